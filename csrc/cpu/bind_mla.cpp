// Bindings of `mla`.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "mla.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

// Sizes, weight and thread count of one layer's attention, bound once.
struct BoundMla {
    const Kernels* kernels;
    const Weight* kv_b;
    nb::object owner;
    MlaSizes sizes;
    int threads;
};

}  // namespace

void bind_mla(nb::module_& m) {
    m.def("encode_rows", [](const LevelHandle& level, uintptr_t rows, int64_t count, int64_t rank,
                            int64_t rope, uintptr_t out, int threads) {
        nb::gil_scoped_release release;
        const CachedRows format(*level.kernels, RowType::e4m3, rank, rope);
#pragma omp parallel for schedule(static) num_threads(team_for(threads, count*(rank + rope), count))
        for (int64_t i = 0; i < count; ++i)
            format.store(at<const float>(rows) + i * (rank + rope), at<uint8_t>(out) + i * format.bytes());
    });
    nb::class_<BoundMla>(m, "Mla")
        .def("__init__",
             [](BoundMla* self, const LevelHandle& level, nb::object kv_b, int64_t heads, int64_t nope,
                int64_t rope, int64_t v, int64_t rank, float scale, int threads) {
                 const auto& w = nb::cast<const Weight&>(kv_b);
                 if (w.rows != heads * (nope + v) || w.columns != rank)
                     throw std::invalid_argument("kv_b_proj does not have these sizes");
                 new (self) BoundMla{level.kernels, &w, kv_b, {heads, nope, rope, v, rank, scale}, threads};
             })
        .def("sparse_attend",
             [](const BoundMla& b, uintptr_t query, int type, int64_t tokens, uintptr_t rows, int row_type,
                int64_t blocks, int64_t page_size, uintptr_t positions, int64_t width, uintptr_t tables,
                int64_t requests, int64_t pages, uintptr_t owners, uintptr_t out) {
                 nb::gil_scoped_release release;
                 sparse_attend(*b.kernels, *b.kv_b, b.sizes,
                               {at<const uint8_t>(rows), static_cast<RowType>(row_type), blocks, page_size},
                               {at<const int64_t>(positions), width, at<const int64_t>(tables), requests,
                                pages, at<const int64_t>(owners)},
                               at<const uint8_t>(query), static_cast<Plain>(type), tokens, at<uint8_t>(out),
                               b.threads);
             })
        .def("dense_attend", [](const BoundMla& b, uintptr_t query, int type, int64_t tokens, uintptr_t rows,
                                int row_type, int64_t blocks, int64_t page_size, uintptr_t table,
                                int64_t pages, int64_t length, uintptr_t out) {
            nb::gil_scoped_release release;
            dense_attend(*b.kernels, *b.kv_b, b.sizes,
                         {at<const uint8_t>(rows), static_cast<RowType>(row_type), blocks, page_size},
                         at<const int64_t>(table), pages, length, at<const uint8_t>(query),
                         static_cast<Plain>(type), tokens, at<uint8_t>(out), b.threads);
        });
}
