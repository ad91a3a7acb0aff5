// Python bindings: addresses as integers, the GIL released, errors as exceptions.
//
// The caller keeps every tensor alive and contiguous; wrappers in hadron/kernels/cpu check shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "bind.h"
#include "features.h"
#include "formats.h"
#include "products.h"

namespace nb = nanobind;
using namespace hadron;

void bind_probes(nb::module_& m);
void bind_norm(nb::module_& m);
void bind_rope(nb::module_& m);
void bind_embedding(nb::module_& m);
void bind_hyper_connection(nb::module_& m);
void bind_router(nb::module_& m);
void bind_kda(nb::module_& m);
void bind_indexer(nb::module_& m);
void bind_mla(nb::module_& m);
void bind_lm_head(nb::module_& m);
void bind_logit_rules(nb::module_& m);
void bind_quantize(nb::module_& m);

namespace {

template <class E>
E parse(const std::string& word, std::initializer_list<const char*> names) {
    int value = 0;
    for (const char* name : names) {
        if (word == name) return static_cast<E>(value);
        ++value;
    }
    throw std::invalid_argument("unknown word: " + word);
}

LevelHandle level(const std::string& name) {
    for (const Kernels* kernels : available_levels()) {
        if (name == kernels->name) return {kernels};
    }
    throw std::invalid_argument("this processor does not run the level " + name);
}

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_levels()) names.emplace_back(kernels->name);
    return names;
}

Weight make_weight(const std::string& element, const std::string& granularity, const std::string& scale_type,
                   int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns,
                   int64_t first_row, int64_t row_bytes, int64_t scale_stride, int64_t zero_stride,
                   uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t bias, float global_scale,
                   bool exact) {
    return Weight{parse<Element>(element, {"f32", "f16", "bf16", "fp8_e4m3", "fp4_e2m1", "fp6_e2m3",
                                           "fp6_e3m2", "int8", "int4"}),
                  parse<Granularity>(granularity, {"none", "tensor", "channel", "block", "group"}),
                  parse<ScaleType>(scale_type, {"f32", "f16", "bf16", "e8m0", "e4m3"}),
                  rows,
                  columns,
                  block_rows,
                  block_columns,
                  first_row,
                  row_bytes,
                  scale_stride,
                  zero_stride,
                  at<const uint8_t>(codes),
                  at<const uint8_t>(scales),
                  at<const int32_t>(zeros),
                  at<const float>(bias),
                  global_scale,
                  exact};
}

// Weights of products that are called together; the objects of Python that hold them are kept alive.
struct WeightList {
    std::vector<const Weight*> weights;
    nb::list owners;
};

// The experts of a layer: their weights are Python objects that this keeps alive.
struct ExpertBank {
    std::vector<GatedMlp> experts;
    nb::list owners;
};

GatedMlp block_of(const Weight& gate, const Weight& up, const Weight& down, float limit) {
    if (gate.rows != up.rows || gate.columns != up.columns || down.columns != gate.rows ||
        down.rows != gate.columns) {
        throw std::invalid_argument("gate, up and down do not fit together");
    }
    return {&gate, &up, &down, limit};
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native CPU kernels on packed weights.";

    nb::class_<LevelHandle>(m, "Level").def_prop_ro("name", [](const LevelHandle& l) {
        return l.kernels->name;
    });
    m.def("level", &level, nb::arg("name"));
    m.def("levels", &levels, "Levels this processor runs, narrowest first.");

    nb::class_<Weight>(m, "Weight").def_ro("rows", &Weight::rows).def_ro("columns", &Weight::columns);
    m.def("weight", &make_weight, nb::arg("element"), nb::arg("granularity"), nb::arg("scale_type"),
          nb::arg("rows"), nb::arg("columns"), nb::arg("block_rows"), nb::arg("block_columns"),
          nb::arg("first_row"), nb::arg("row_bytes"), nb::arg("scale_stride"), nb::arg("zero_stride"),
          nb::arg("codes"), nb::arg("scales"), nb::arg("zeros"), nb::arg("bias"), nb::arg("global_scale"),
          nb::arg("exact"));

    nb::class_<WeightList>(m, "WeightList")
        .def(nb::init<>())
        .def("add", [](WeightList& list, nb::object weight) {
            list.weights.push_back(&nb::cast<const Weight&>(weight));
            list.owners.append(weight);
        });

    nb::class_<ExpertBank>(m, "ExpertBank")
        .def(nb::init<>())
        .def("add", [](ExpertBank& bank, nb::object gate, nb::object up, nb::object down, nb::object kept,
                       float limit) {
            bank.experts.push_back(block_of(nb::cast<const Weight&>(gate), nb::cast<const Weight&>(up),
                                            nb::cast<const Weight&>(down), limit));
            bank.owners.append(nb::make_tuple(gate, up, down, kept));
        });

    m.def("linear",
          [](const LevelHandle& l, const Weight& w, uintptr_t x, int64_t tokens, uintptr_t y, int threads) {
              nb::gil_scoped_release release;
              linears(*l.kernels, {{&w, at<const float>(x), at<float>(y)}}, tokens, threads);
          });
    // Results lie one after the other in y: [weight][tokens, rows].
    m.def("linears", [](const LevelHandle& l, const WeightList& list, const std::vector<uintptr_t>& x,
                        int64_t tokens, uintptr_t y, int threads) {
        if (x.size() != list.weights.size()) throw std::invalid_argument("one input a weight");
        nb::gil_scoped_release release;
        std::vector<Product> products;
        auto* out = at<float>(y);
        for (size_t i = 0; i < x.size(); ++i) {
            products.push_back({list.weights[i], at<const float>(x[i]), out});
            out += tokens * list.weights[i]->rows;
        }
        linears(*l.kernels, products, tokens, threads);
    });
    m.def("mlp", [](const LevelHandle& l, const Weight& gate, const Weight& up, const Weight& down,
                    float limit, uintptr_t x, int64_t tokens, uintptr_t y, int threads) {
        const GatedMlp block = block_of(gate, up, down, limit);
        nb::gil_scoped_release release;
        mlp(*l.kernels, block, at<const float>(x), tokens, at<float>(y), threads);
    });
    m.def("moe",
          [](const LevelHandle& l, const ExpertBank& bank, bool shared, uintptr_t x, uintptr_t ids,
             uintptr_t weights, int64_t tokens, int64_t top_k, int64_t hidden, uintptr_t y, int threads) {
              const int64_t count = static_cast<int64_t>(bank.experts.size()) - (shared ? 1 : 0);
              const auto* chosen = at<const int64_t>(ids);
              for (int64_t i = 0; i < tokens * top_k; ++i) {
                  if (chosen[i] < 0 || chosen[i] >= count)
                      throw std::out_of_range("an expert id is out of range");
              }
              nb::gil_scoped_release release;
              moe(*l.kernels, bank.experts, shared ? &bank.experts.back() : nullptr, at<const float>(x),
                  chosen, at<const float>(weights), tokens, top_k, hidden, at<float>(y), threads);
          });
    bind_probes(m);
    bind_norm(m);
    bind_rope(m);
    bind_embedding(m);
    bind_hyper_connection(m);
    bind_router(m);
    bind_kda(m);
    bind_indexer(m);
    bind_mla(m);
    bind_lm_head(m);
    bind_logit_rules(m);
    bind_quantize(m);
    m.def("dequantize", [](const LevelHandle& l, const Weight& w, uintptr_t out) {
        nb::gil_scoped_release release;
        for (int64_t row = 0; row < w.rows; ++row)
            l.kernels->dequantize(w, row, at<float>(out) + row * w.columns);
    });
}
