// Bindings of `indexer`.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "indexer.h"

namespace nb = nanobind;
using namespace hadron;

void bind_indexer(nb::module_& m) {
    m.def("index_store", [](const LevelHandle& level, uintptr_t rows, int type, int64_t blocks,
                            int64_t rows_per_page, int64_t size, int64_t pool, uintptr_t query_lens,
                            uintptr_t lengths, int64_t requests, int64_t tokens, uintptr_t slots,
                            uintptr_t keys, uintptr_t gates, uintptr_t table, uintptr_t tails,
                            uintptr_t state_slots) {
        nb::gil_scoped_release release;
        store_keys(*level.kernels,
                   {at<uint8_t>(rows), static_cast<Plain>(type), blocks, rows_per_page, size, pool},
                   {at<const int64_t>(query_lens), at<const int64_t>(lengths), requests, nullptr, 0, tokens},
                   at<const int64_t>(slots), at<const float>(keys), at<const float>(gates),
                   at<const float>(table), at<float>(tails), at<const int64_t>(state_slots));
    });
    // None, or (token, key, score) of the first score that is not finite.
    m.def("index_select",
          [](const LevelHandle& level, uintptr_t rows, int type, int64_t blocks, int64_t rows_per_page,
             int64_t size, int64_t pool, uintptr_t query_lens, uintptr_t lengths, int64_t requests,
             uintptr_t tables, int64_t pages, int64_t tokens, uintptr_t query, int query_type,
             uintptr_t weights, uintptr_t positions, int64_t heads, int64_t count, bool tail, uintptr_t out,
             int64_t width, int threads) -> nb::object {
              std::optional<NotFinite> bad;
              {
                  nb::gil_scoped_release release;
                  bad = select_keys(
                      *level.kernels,
                      {at<uint8_t>(rows), static_cast<Plain>(type), blocks, rows_per_page, size, pool},
                      {at<const int64_t>(query_lens), at<const int64_t>(lengths), requests,
                       at<const int64_t>(tables), pages, tokens},
                      at<const uint8_t>(query), static_cast<Plain>(query_type), at<const float>(weights),
                      at<const int64_t>(positions), heads, count, tail, at<int64_t>(out), width, threads);
              }
              if (!bad) return nb::none();
              return nb::make_tuple(bad->token, bad->key, bad->score);
          });
}
