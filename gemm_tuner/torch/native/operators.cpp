/* The operators of PyTorch that pack weights and call kernels.
 *
 *   gemm_tuner::pack(w, size_bytes, layer, scales, zero_points) -> packed
 *   gemm_tuner::unpack(packed, layer)                         -> w
 *   gemm_tuner::linear(x, packed, bias, layer, other, w)      -> y
 *   gemm_tuner::fused_linear(x, packed, operands, numbers, layer, w)
 *                                                             -> y, of any chain of steps
 *   gemm_tuner::linear_or_plain(x, weight, bias, packed, layer, is_fixed)
 *                                                             -> y, of a kernel or of at::linear;
 *                                                             of oneDNN where layer is -1
 *   gemm_tuner::matmul_or_plain(x, w, layers, is_bmm), attention_or_plain(q, k, v, layers, ...)
 *                                                             -> y, of a kernel or of PyTorch's own
 *   gemm_tuner::patches(x, kernel, stride, padding, dilation) -> rows, of an image's patches
 *   gemm_tuner::onednn_pack(w, rows), onednn_linear(x, packed, bias, n)
 *                                                             -> y, by oneDNN
 *   gemm_tuner::matmul(x, w, layer, bias, other, scale)       -> y, of x and w that come with the call
 *   gemm_tuner::attention(q, k, v, layer, mask, scale)        -> y, of scores that are not kept
 *
 *   gemm_tuner::read_layers(folder)                           -> ()
 *
 * A layer is one n and k with kernels for one or several m, whose weights are packed in as few
 * formats as they read. It is a number: Python loads the kernels, checks them, and says what they
 * are by gemm_tuner_add_layer. Where there is no Python, layers.txt says it (layers_file.h): a layer
 * that nobody has told of is looked for in the folder of this library. Kernels and layers are never
 * removed, so a call takes no lock.
 *
 * With w (batch, n, k), packed is (batch, bytes), and x, y and other are of (batch, rows, columns):
 * products of the same sizes, each of its own weights. bias is then (n) or (batch, n).
 *
 * `linear` is for layers of floats that read a bias, another array, or both; fused_linear for all.
 * Its `operands` are in the order of the steps that read one: an array, or None where the number at
 * the same place of `numbers` is the operand.
 *
 * The parts of a kernel run in PyTorch's own threads, and its weights are packed there. */
#include "gemm_tuner.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/round.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

using at::Tensor;

#include "steps.h"
#include "layers.h"
#include "rows.h"
#include "calls.h"
#include "matmul.h"
#include "groups.h"
#include "attention.h"
#include "onednn.h"
#include "packing.h"
#include "patches.h"
#include "unpacking.h"
#include "frozen.h"

namespace {

/* Refuse operands that are not those of the steps, by shapes and types alone. */
void check_operands(const LayerEntry &layer, const Tensor &x, const Operands &given,
                    std::optional<int64_t> batch) {
    Lengths shape(x.sizes().begin(), x.sizes().end());
    shape.back() = layer.n;
    const at::ScalarType type = layer.types.operand();
    for (size_t place = 0; place < layer.operands.size(); place++) {
        const Operand &one = given[place];
        switch (layer.operands[place]) {
        case Step::bias:
            checked_own_vector("bias", array_of("bias", one), layer.n, type, batch);
            break;
        case Step::channel_scale:
            checked_own_vector("channel_scale", array_of("channel_scale", one), layer.n, at::kFloat,
                               std::nullopt);
            break;
        case Step::add:
            if (batch) {
                check_batch("other", checked_other(one, shape), *batch, layer.n, type);
            } else {
                check_rows("other", checked_other(one, shape), layer.n, type);
            }
            break;
        default:
            check_number(one);
        }
    }
}

/* Compute a layer; `given` are what its steps read, in their order. */
Tensor compute(const LayerEntry &layer, const Tensor &x, const Tensor &packed,
               const Operands &given, const std::optional<Tensor> &w) {
    const int64_t n = layer.n;
    const Types &types = layer.types;
    const Tensor packed_w = checked_packed(layer, packed);
    const bool is_batch = packed.dim() == 2;
    const int64_t batch = is_batch ? packed.size(0) : 1;
    const auto read = [&](const char *name, const Tensor &tensor, int64_t columns,
                          at::ScalarType type) {
        return is_batch ? batch_of(name, tensor, batch, columns, type)
                        : rows_of(name, tensor, columns, type);
    };
    const Rows rows = read("x", x, layer.k, types.x);
    c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = n;
    const bool is_empty = rows.count == 0 || batch == 0;
    const KernelEntry *kernel = is_empty ? nullptr : kernel_for(layer, rows.count);
    if (!is_empty && !kernel) {
        check_plain_weights(rows.count, w, n, layer.k);
        check_operands(layer, x, given, is_batch ? std::optional(batch) : std::nullopt);
        return linear_plain(layer, x, given, *w);
    }
    Tensor y(at::detail::empty_cpu(shape, types.y));
    if (is_empty) {
        return y;
    }
    ReadOperands operands;
    for (size_t place = 0; place < layer.operands.size(); place++) {
        const Operand &one = given[place];
        switch (layer.operands[place]) {
        case Step::bias:
            operands.read_vector(place, "bias", array_of("bias", one), n, types.operand(),
                                 is_batch ? std::optional(batch) : std::nullopt);
            break;
        case Step::channel_scale:
            operands.read_vector(place, "channel_scale", array_of("channel_scale", one), n,
                                 at::kFloat, std::nullopt);
            break;
        case Step::add:
            operands.read_rows(place,
                               read("other", checked_other(one, shape), n, types.operand()));
            break;
        case Step::scale:
            operands.read_scale(place, one);
            break;
        default:
            operands.read_zero_point(place, one);
        }
    }
    gemm_tuner_args args = {};
    args.size_bytes = sizeof args;
    args.m = rows.count;
    args.batch = batch;
    args.heads = 1;
    args.x = rows.elements;
    args.x_leading_dimension = rows.leading_dimension;
    args.x_batch_stride = rows.batch_stride;
    args.packed_w = static_cast<const char *>(packed_w.const_data_ptr()) + kernel->packed_offset;
    args.packed_w_batch_stride_bytes = is_batch ? layer.packed_bytes : 0;
    args.y = y.mutable_data_ptr();
    args.y_leading_dimension = n;
    args.y_batch_stride = rows.count * n;
    args.operands = operands.elements;
    args.operand_count = layer.operands.size();
    run_watched(layer, *kernel, args);
    return y;
}

/* What the steps of a layer that `linear` computes read. */
Operands bias_and_other(const LayerEntry &layer, const std::optional<Tensor> &bias,
                        const std::optional<Tensor> &other) {
    TORCH_CHECK(layer.reads_bias_and_other, "layer ", layer.number,
                " reads more than a bias and another array; fused_linear computes it.");
    Operands given;
    for (const Step step : layer.operands) {
        const std::optional<Tensor> &array = step == Step::bias ? bias : other;
        given.push_back({array ? &*array : nullptr, 0});
    }
    return given;
}

/* What the steps of any layer read. */
Operands operands_in_order(const LayerEntry &layer,
                           const std::vector<std::optional<Tensor>> &arrays,
                           at::ArrayRef<double> numbers) {
    const size_t count = layer.operands.size();
    TORCH_CHECK(arrays.size() == count && numbers.size() == count, "layer ", layer.number,
                " reads ", count, " operands, but there are ", arrays.size(), " and ",
                numbers.size(), " numbers.");
    Operands given;
    for (size_t place = 0; place < count; place++) {
        given.push_back({arrays[place] ? &*arrays[place] : nullptr, numbers[place]});
    }
    return given;
}

Tensor linear(const Tensor &x, const Tensor &packed, const std::optional<Tensor> &bias,
              int64_t number, const std::optional<Tensor> &other, const std::optional<Tensor> &w) {
    const LayerEntry &layer = linear_numbered(number);
    return compute(layer, x, packed, bias_and_other(layer, bias, other), w);
}

/* The arrays themselves: PyTorch resolves what stands for one elsewhere, but not in such a list. */
std::vector<std::optional<Tensor>> resolved(const c10::List<std::optional<Tensor>> &operands) {
    std::vector<std::optional<Tensor>> arrays = operands.vec();
    for (std::optional<Tensor> &one : arrays) {
        if (one && one->defined()) {
            one = one->_is_zerotensor() ? at::zeros(one->sizes(), one->options().device(at::kCPU))
                                        : one->resolve_conj().resolve_neg();
        }
    }
    return arrays;
}

Tensor fused_linear(const Tensor &x, const Tensor &packed,
                    const c10::List<std::optional<Tensor>> &operands,
                    at::ArrayRef<double> numbers, int64_t number,
                    const std::optional<Tensor> &w) {
    const LayerEntry &layer = linear_numbered(number);
    const std::vector<std::optional<Tensor>> arrays = resolved(operands);
    return compute(layer, x, packed, operands_in_order(layer, arrays, numbers), w);
}

/* Refuse what `compute` does, by shapes and types alone. */
void check_call(const LayerEntry &layer, const Tensor &x, const Tensor &packed,
                const Operands &given, const std::optional<Tensor> &w) {
    check_packed(layer, packed);
    const bool is_batch = packed.dim() == 2;
    const std::optional<int64_t> batch =
        is_batch ? std::optional(packed.size(0)) : std::nullopt;
    if (is_batch) {
        check_batch("x", x, *batch, layer.k, layer.types.x);
    } else {
        check_rows("x", x, layer.k, layer.types.x);
    }
    const int64_t count = is_batch ? x.size(1) : layer.k ? x.numel() / layer.k : 0;
    if (count == 0 || batch == 0) {
        return;
    }
    if (!kernel_for(layer, count)) {
        check_plain_weights(count, w, layer.n, layer.k);
    }
    check_operands(layer, x, given, batch);
}

Tensor empty_result(const Tensor &x, const Tensor &packed, const LayerEntry &layer) {
    TORCH_CHECK(packed.scalar_type() == at::kByte, "packed must be what gemm_tuner::pack returned.");
    c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
    TORCH_CHECK(!shape.empty(), "x must have at least one dimension.");
    TORCH_CHECK(packed.dim() == 1 || shape.size() == 3, "x must be (batch, rows, columns).");
    shape.back() = layer.n;
    return at::empty_symint(shape, x.options().dtype(layer.types.y));
}

/* What a compiler does not know is checked when it runs. */
Tensor linear_meta(const Tensor &x, const Tensor &packed, const std::optional<Tensor> &bias,
                   int64_t number, const std::optional<Tensor> &other,
                   const std::optional<Tensor> &w) {
    const LayerEntry &layer = linear_numbered(number);
    const Operands given = bias_and_other(layer, bias, other);
    if (are_sizes_known(x, packed, bias, other)) {
        check_call(layer, x, packed, given, w);
    }
    return empty_result(x, packed, layer);
}

Tensor fused_linear_meta(const Tensor &x, const Tensor &packed,
                         const c10::List<std::optional<Tensor>> &operands,
                         at::ArrayRef<double> numbers, int64_t number,
                         const std::optional<Tensor> &w) {
    const LayerEntry &layer = linear_numbered(number);
    const std::vector<std::optional<Tensor>> arrays = operands.vec();
    const Operands given = operands_in_order(layer, arrays, numbers);
    const bool are_known = std::all_of(arrays.begin(), arrays.end(), [](const auto &one) {
        return is_size_known(one);
    });
    if (are_known && are_sizes_known(x, packed)) {
        check_call(layer, x, packed, given, w);
    }
    return empty_result(x, packed, layer);
}

Tensor pack_meta(const Tensor &w, int64_t size_bytes, int64_t, const std::optional<Tensor> &,
                 const std::optional<Tensor> &) {
    const c10::SymInt size = size_bytes;
    const auto options = w.options().dtype(at::kByte);
    return w.dim() == 3 ? at::empty_symint({w.sym_size(0), size}, options)
                        : at::empty_symint({size}, options);
}

bool is_recorded(const Tensor &tensor) {
    return tensor._fw_grad(0).defined() ||
           (c10::GradMode::is_enabled() && tensor.requires_grad());
}

bool is_recorded(const std::optional<Tensor> &tensor) {
    return tensor && tensor->defined() && is_recorded(*tensor);
}

bool is_recorded(const c10::List<std::optional<Tensor>> &tensors) {
    const std::vector<std::optional<Tensor>> arrays = tensors.vec();
    return std::any_of(arrays.begin(), arrays.end(),
                       [](const std::optional<Tensor> &one) { return is_recorded(one); });
}

template <typename Number> bool is_recorded(const Number &) { return false; }

template <size_t size> struct Name {
    char text[size];
    constexpr Name(const char (&given)[size]) { std::copy_n(given, size, text); }
};

/* There is no derivative: who wants one gets an error, never a result without it. */
template <Name name, auto function> struct NotRecorded;
template <Name name, typename... Arguments, Tensor (*function)(Arguments...)>
struct NotRecorded<name, function> {
    static Tensor call(Arguments... arguments) {
        TORCH_CHECK_NOT_IMPLEMENTED(!(is_recorded(arguments) || ...),
                                    "gemm_tuner's operators have no derivative; call them under "
                                    "torch.no_grad(), and train with the plain layer.");
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow(name.text, "")
                                   .template typed<Tensor(Arguments...)>();
        at::AutoDispatchBelowADInplaceOrView below;
        return op.call(arguments...);
    }
};

/* Recorded tensors have PyTorch's own derivative. */
Tensor attention_autograd(const Tensor &q, const Tensor &k, const Tensor &v, int64_t number,
                          const std::optional<Tensor> &mask, double scale) {
    if (is_recorded(q) || is_recorded(k) || is_recorded(v) || is_recorded(mask)) {
        const LayerEntry &layer = attention_numbered(number);
        check_known_attention(layer, q, k, v, mask, scale);
        return attention_plain(layer, q, k, v, mask, scale);
    }
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("gemm_tuner::attention", "")
                               .typed<decltype(attention)>();
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(q, k, v, number, mask, scale);
}

} // namespace

#include "eager.h"

namespace {

void read_layers(std::string folder) { gemm_tuner_layers::read(folder, add_layer); }

void check_meta(const Tensor &tensor) {
    TORCH_CHECK(!tensor.defined() || tensor.is_meta(), "an array is on ", tensor.device(),
                ", and another on meta; give all on one device.");
}

void check_meta(const std::optional<Tensor> &tensor) {
    if (tensor) {
        check_meta(*tensor);
    }
}

void check_meta(const c10::List<std::optional<Tensor>> &tensors) {
    for (const std::optional<Tensor> &one : tensors.vec()) {
        check_meta(one);
    }
}

template <typename Number> void check_meta(const Number &) {}

/* A meta kernel that refuses arrays with memory: PyTorch calls it where one of them has none. */
template <auto function> struct OnMeta;
template <typename... Arguments, Tensor (*function)(Arguments...)> struct OnMeta<function> {
    static Tensor call(Arguments... arguments) {
        (check_meta(arguments), ...);
        return function(arguments...);
    }
};

} // namespace

TORCH_LIBRARY(gemm_tuner, library) {
    library.def("pack(Tensor w, int size_bytes, int layer, Tensor? scales=None, "
                "Tensor? zero_points=None) -> Tensor",
                {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
    library.def("unpack(Tensor packed, int layer) -> Tensor");
    library.def("linear(Tensor x, Tensor packed, Tensor? bias, int layer, Tensor? other=None, "
                "Tensor? w=None) -> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("onednn_pack(Tensor w, int rows) -> Tensor", {at::Tag::flexible_layout});
    library.def("onednn_linear(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor",
                {at::Tag::flexible_layout});
    library.def("patches(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation) "
                "-> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("fused_linear(Tensor x, Tensor packed, Tensor?[] operands, float[] numbers, "
                "int layer, Tensor? w=None) -> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("matmul(Tensor x, Tensor w, int layer, Tensor? bias=None, Tensor? other=None, "
                "float scale=1.0) -> Tensor",
                {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
    library.def("attention(Tensor q, Tensor k, Tensor v, int layer, Tensor? mask=None, "
                "float scale=1.0) -> Tensor",
                {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
    library.def("grouped_matmul(Tensor x, Tensor w, Tensor ends, int layer) -> Tensor",
                {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
    library.def("linear_or_plain(Tensor x, Tensor weight, Tensor? bias, Tensor packed, int layer, "
                "bool is_fixed) -> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("matmul_or_plain(Tensor x, Tensor w, int[] layers, bool is_bmm) -> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("grouped_or_plain(Tensor x, Tensor w, Tensor ends, int[] layers) -> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("attention_or_plain(Tensor q, Tensor k, Tensor v, int[] layers, Tensor? mask=None, "
                "float dropout=0.0, bool is_causal=False, float? scale=None, "
                "bool enable_gqa=False) -> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("read_layers(str folder) -> ()");
}

TORCH_LIBRARY_IMPL(gemm_tuner, CompositeImplicitAutograd, library) {
    library.impl("linear_or_plain", linear_or_plain);
    library.impl("matmul_or_plain", matmul_or_plain);
    library.impl("grouped_or_plain", grouped_or_plain);
    library.impl("attention_or_plain", attention_or_plain);
    library.impl("read_layers", read_layers);
}

TORCH_LIBRARY_IMPL(gemm_tuner, CompositeExplicitAutograd, library) {
    library.impl("onednn_pack", onednn_pack);
    library.impl("onednn_linear", onednn_linear);
}

TORCH_LIBRARY_IMPL(gemm_tuner, CPU, library) {
    library.impl("pack", pack);
    library.impl("unpack", unpack);
    library.impl("linear", linear);
    library.impl("fused_linear", fused_linear);
    library.impl("patches", patches);
    library.impl("matmul", matmul);
    library.impl("grouped_matmul", grouped_matmul);
    library.impl("attention", attention);
}

TORCH_LIBRARY_IMPL(gemm_tuner, Meta, library) {
    library.impl("pack", OnMeta<pack_meta>::call);
    library.impl("linear", OnMeta<linear_meta>::call);
    library.impl("fused_linear", OnMeta<fused_linear_meta>::call);
    library.impl("patches", patches_meta);
    library.impl("onednn_pack", onednn_pack_meta);
    library.impl("onednn_linear", onednn_linear_meta);
    library.impl("matmul", OnMeta<matmul_meta>::call);
    library.impl("grouped_matmul", OnMeta<grouped_matmul_meta>::call);
    library.impl("attention", OnMeta<attention_meta>::call);
}

TORCH_LIBRARY_IMPL(gemm_tuner, Autograd, library) {
    library.impl("pack", NotRecorded<"gemm_tuner::pack", pack>::call);
    library.impl("linear", NotRecorded<"gemm_tuner::linear", linear>::call);
    library.impl("fused_linear", NotRecorded<"gemm_tuner::fused_linear", fused_linear>::call);
    library.impl("onednn_linear", NotRecorded<"gemm_tuner::onednn_linear", onednn_linear>::call);
    library.impl("patches", NotRecorded<"gemm_tuner::patches", patches>::call);
    library.impl("matmul", NotRecorded<"gemm_tuner::matmul", matmul>::call);
    library.impl("grouped_matmul", NotRecorded<"gemm_tuner::grouped_matmul", grouped_matmul>::call);
    library.impl("attention", attention_autograd);
}

#include "shims.h"

/* For ctypes. Whoever adds a layer has checked its kernels; one number is one layer for ever. */
extern "C" __attribute__((visibility("default"))) void
gemm_tuner_add_layer(const LayerFacts *facts, const KernelEntry *kernels, int64_t kernel_count) {
    add_layer(*facts, kernels, kernel_count);
}

/* Let functions see what this thread calls and packs, or NULL for none. */
extern "C" __attribute__((visibility("default"))) void gemm_tuner_watch(OnCall call, OnPack pack) {
    on_call = call;
    on_pack = pack;
}
