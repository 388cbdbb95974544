/* The operators of PyTorch that pack weights and call kernels.
 *
 *   gemm_tuner::pack(w, size_bytes, layer)                    -> packed
 *   gemm_tuner::linear(x, packed, bias, layer, other, w)      -> y
 *   gemm_tuner::linear_or_plain(x, weight, bias, packed, layer)
 *                                                             -> y, of a kernel or of at::linear
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
 * The parts of a kernel run in PyTorch's own threads, and its weights are packed there. */
#include "gemm_tuner.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

using at::Tensor;

/* What Python says of a kernel; gemm_tuner/torch/operators.py has the same structure. */
struct KernelEntry {
    const char *name; /* of its problem */
    decltype(&gemm_tuner_run) run;
    decltype(&gemm_tuner_pack_weights) pack;
    decltype(&gemm_tuner_pack_weights_part) pack_part; /* NULL before version 3 of the interface */
    decltype(&gemm_tuner_workspace_bytes) workspace_bytes;
    int64_t m_low, m_high;
    int64_t packed_offset; /* of its format in the packed tensor, in bytes */
    int32_t is_packer;     /* whether it packs this format */
    int32_t phases;
    int32_t threads; /* for how many it was tuned, */
    int32_t parts;   /* and in how many parts */
};

constexpr int max_steps = 8, step_kinds = 13;

/* What Python says of a layer; gemm_tuner/torch/operators.py has the same structure, and the
 * numbers of types and steps. */
struct LayerFacts {
    int64_t number, n, k, packed_bytes;
    int32_t type; /* 0 f32, 1 bf16 */
    int32_t step_count;
    int32_t steps[max_steps];
};

#include "layers_file.h"
#include "rows.h"

namespace {

/* The steps of an epilogue; those with parameters have the default ones of the epilogue table. */
enum class Step : int32_t {
    bias,
    add,
    relu,
    leaky_relu,
    clamp,
    hardswish,
    sigmoid,
    tanh,
    silu,
    gelu_erf,
    gelu_tanh,
    elu,
    mish,
};
static_assert(static_cast<int>(Step::mish) + 1 == step_kinds);

constexpr size_t max_operands = 2; /* one bias, one array that is added */

struct LayerEntry {
    int64_t number, n, k, packed_bytes;
    at::ScalarType type;
    std::vector<Step> steps;
    std::vector<Step> operands; /* the steps that read an array */
    std::vector<KernelEntry> kernels; /* the narrowest range of m first */
    const LayerEntry *next;
};

constexpr size_t bucket_count = 4096;
std::atomic<const LayerEntry *> layers[bucket_count];
std::mutex adding;

/* What a thread wants to know of its calls: the layer, the arguments, and the time of a call of a
 * kernel in ns; of the weights of each product that it packs, the layer. It may write to y. */
using OnCall = void (*)(int64_t number, const gemm_tuner_args *args, int64_t time_ns);
using OnPack = void (*)(int64_t number, const gemm_tuner_weights *weights);
thread_local OnCall on_call;
thread_local OnPack on_pack;

std::atomic<const LayerEntry *> &bucket_of(int64_t number) {
    return layers[static_cast<uint64_t>(number) % bucket_count];
}

const LayerEntry *find_layer(int64_t number) {
    const LayerEntry *layer = bucket_of(number).load(std::memory_order_acquire);
    while (layer && layer->number != number) {
        layer = layer->next;
    }
    return layer;
}

void add_layer(const LayerFacts &facts, const KernelEntry *kernels, int64_t kernel_count) {
    const std::lock_guard lock(adding);
    if (find_layer(facts.number)) {
        return;
    }
    std::atomic<const LayerEntry *> &bucket = bucket_of(facts.number);
    auto *layer = new LayerEntry{};
    layer->number = facts.number;
    layer->n = facts.n;
    layer->k = facts.k;
    layer->packed_bytes = facts.packed_bytes;
    layer->type = facts.type == 0 ? at::kFloat : at::kBFloat16;
    for (int32_t i = 0; i < facts.step_count; i++) {
        const auto step = static_cast<Step>(facts.steps[i]);
        layer->steps.push_back(step);
        if (step == Step::bias || step == Step::add) {
            layer->operands.push_back(step);
        }
    }
    layer->kernels.assign(kernels, kernels + kernel_count);
    for (KernelEntry &kernel : layer->kernels) {
        kernel.name = strdup(kernel.name);
    }
    layer->next = bucket.load();
    bucket.store(layer, std::memory_order_release);
}

const LayerEntry &layer_numbered(int64_t number) {
    const LayerEntry *layer = find_layer(number);
    if (!layer) {
        static std::once_flag reading; /* not set if it throws */
        std::call_once(reading, [] { gemm_tuner_layers::read_beside(add_layer); });
        layer = find_layer(number);
    }
    TORCH_CHECK(layer, "gemm-tuner has no kernels for layer ", number,
                " in this process; compile the model here, after gemm_tuner.torch.enable, or load "
                "what write_kernels wrote, by gemm_tuner.torch.load_kernels.");
    return *layer;
}

struct AlignedFree {
    void operator()(void *memory) const { std::free(memory); }
};

/* The workspace of this thread, kept between calls. */
void *workspace(uint64_t size_bytes) {
    thread_local std::unique_ptr<void, AlignedFree> memory;
    thread_local uint64_t capacity;
    if (size_bytes > capacity) {
        const uint64_t rounded = (size_bytes + GEMM_TUNER_ALIGNMENT - 1) / GEMM_TUNER_ALIGNMENT *
                                 GEMM_TUNER_ALIGNMENT;
        memory.reset();
        capacity = 0;
        memory.reset(std::aligned_alloc(GEMM_TUNER_ALIGNMENT, rounded));
        TORCH_CHECK(memory, "gemm-tuner: no memory for a workspace of ", rounded, " bytes.");
        capacity = rounded;
    }
    return size_bytes ? memory.get() : nullptr;
}

struct Job {
    const KernelEntry *kernel;
    const gemm_tuner_args *args;
    int32_t phase, parts;
    std::atomic<int32_t> status;
};

void run_parts(int64_t begin, int64_t end, void *context) {
    Job &job = *static_cast<Job *>(context);
    for (int64_t part = begin; part < end; part++) {
        const int32_t status =
            job.kernel->run(job.args, job.phase, static_cast<int32_t>(part), job.parts);
        if (status != GEMM_TUNER_OK) {
            job.status = status;
        }
    }
}

/* As many parts as were timed, or one for each thread where PyTorch uses another number. */
int32_t count_parts(const KernelEntry &kernel, int64_t batch = 1) {
    const int32_t threads = at::get_num_threads();
    if (threads == 1 || at::in_parallel_region()) {
        return 1;
    }
    const int32_t parts = threads == kernel.threads ? std::min(threads, kernel.parts) : threads;
    /* Whole products are no smaller for being dealt out. */
    return std::max(parts, static_cast<int32_t>(std::min<int64_t>(threads, batch)));
}

/* What the profiler shows: the problem, its operations, and the bytes of x, w and y. */
std::string profiled_name(const LayerEntry &layer, const KernelEntry &kernel, int64_t m,
                          int64_t batch) {
    const double count_m = static_cast<double>(m), count = static_cast<double>(batch);
    const double n = static_cast<double>(layer.n), k = static_cast<double>(layer.k);
    const double elements = count * (count_m * k + n * k + count_m * n);
    const double bytes = elements * static_cast<double>(c10::elementSize(layer.type));
    char counts[96];
    std::snprintf(counts, sizeof counts, " (m = %lld, %.6g MFLOP, %.6g MB)",
                  static_cast<long long>(m), 2e-6 * count * count_m * n * k, 1e-6 * bytes);
    const std::string many = batch == 1 ? "" : std::to_string(batch) + " of ";
    return "gemm-tuner " + many + kernel.name + counts;
}

void run_kernel(const LayerEntry &layer, const KernelEntry &kernel, gemm_tuner_args &args) {
    at::RecordFunction profiled(at::RecordScope::FUNCTION);
    if (profiled.isActive()) {
        profiled.before(profiled_name(layer, kernel, args.m, args.batch));
    }
    const int32_t parts = count_parts(kernel, args.batch);
    args.workspace = workspace(kernel.workspace_bytes(parts));
    Job job{&kernel, &args, 0, parts, GEMM_TUNER_OK};
    for (; job.phase < kernel.phases; job.phase++) {
        if (parts == 1) {
            run_parts(0, 1, &job);
        } else {
            TORCH_CHECK(torch_parallel_for(0, parts, 1, run_parts, &job) == 0,
                        "gemm-tuner: PyTorch could not run a kernel in its threads.");
        }
    }
    TORCH_CHECK(job.status == GEMM_TUNER_OK, "gemm-tuner: a kernel refused its arguments (m = ",
                args.m, ", ", parts, " parts); tune the layer again.");
}

const KernelEntry *kernel_for(const LayerEntry &layer, int64_t rows) {
    for (const KernelEntry &kernel : layer.kernels) {
        if (kernel.m_low <= rows && rows <= kernel.m_high) {
            return &kernel;
        }
    }
    return nullptr;
}

bool is_aligned(const Tensor &packed) {
    return reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % GEMM_TUNER_ALIGNMENT == 0;
}

/* Memory for weights that a call reads from one end to the other: on pages of 2 MiB, where the
 * system has them on request, as the weights of a kernel that was timed alone are. */
Tensor empty_weights(int64_t size_bytes) {
    Tensor packed(at::detail::empty_cpu({size_bytes}, at::kByte));
    constexpr uintptr_t page = uintptr_t{1} << 21;
    const auto begin = reinterpret_cast<uintptr_t>(packed.mutable_data_ptr());
    const uintptr_t first = (begin + page - 1) / page * page;
    const uintptr_t last = (begin + static_cast<uintptr_t>(size_bytes)) / page * page;
    if (first < last) {
        madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE); /* or go without */
    }
    return packed;
}

/* Packed weights that lie at no multiple of the alignment, such as the constants of a model that
 * AOTInductor has compiled: each is copied once, and the copy stays while the original does. */
struct AlignedCopy {
    c10::weak_intrusive_ptr<c10::StorageImpl> original;
    Tensor copy;
};
std::mutex copying;
std::unordered_map<const void *, AlignedCopy> aligned_copies;

Tensor aligned(const Tensor &packed) {
    const void *elements = packed.const_data_ptr();
    const std::lock_guard lock(copying);
    const auto known = aligned_copies.find(elements);
    if (known != aligned_copies.end()) {
        /* Another storage may have come to the address of one that is gone. */
        const auto original = known->second.original.lock();
        if (original.get() == packed.storage().unsafeGetStorageImpl() &&
            known->second.copy.numel() == packed.numel()) {
            return known->second.copy;
        }
    }
    for (auto one = aligned_copies.begin(); one != aligned_copies.end();) {
        one = one->second.original.expired() ? aligned_copies.erase(one) : std::next(one);
    }
    Tensor copy = empty_weights(packed.numel());
    std::memcpy(copy.mutable_data_ptr(), elements, copy.nbytes());
    aligned_copies.insert_or_assign(
        elements, AlignedCopy{packed.storage().getWeakStorageImpl(), copy});
    return copy;
}

Tensor checked_packed(const LayerEntry &layer, const Tensor &packed) {
    const bool is_shaped = packed.dim() == 1 || packed.dim() == 2;
    TORCH_CHECK(packed.scalar_type() == at::kByte && is_shaped &&
                    packed.size(-1) == layer.packed_bytes && packed.is_contiguous(),
                "packed is not what gemm_tuner::pack returned for this layer.");
    return is_aligned(packed) ? packed : aligned(packed);
}

Tensor apply_step(Step step, const Tensor &y, const std::optional<Tensor> &bias,
                  const std::optional<Tensor> &other) {
    switch (step) {
    case Step::bias:
        TORCH_CHECK(bias, "bias must be given.");
        return at::add(y, bias->dim() == 2 ? bias->unsqueeze(1) : *bias);
    case Step::add:
        TORCH_CHECK(other && other->sizes() == y.sizes(), "other must have the shape of y, ",
                    y.sizes(), ".");
        return at::add(y, *other);
    case Step::relu:
        return at::relu(y);
    case Step::leaky_relu:
        return at::leaky_relu(y);
    case Step::clamp:
        return at::clamp(y, -1, 1);
    case Step::hardswish:
        return at::hardswish(y);
    case Step::sigmoid:
        return at::sigmoid(y);
    case Step::tanh:
        return at::tanh(y);
    case Step::silu:
        return at::silu(y);
    case Step::gelu_erf:
        return at::gelu(y);
    case Step::gelu_tanh:
        return at::gelu(y, "tanh");
    case Step::elu:
        return at::elu(y);
    case Step::mish:
        return at::mish(y);
    }
    TORCH_CHECK(false, "a step of number ", static_cast<int>(step), " is not known.");
}

/* What the kernels compute, for rows that none of them is for. */
Tensor linear_plain(const LayerEntry &layer, int64_t rows, const Tensor &x,
                    const std::optional<Tensor> &bias, const std::optional<Tensor> &other,
                    const std::optional<Tensor> &w) {
    TORCH_CHECK(w, "no kernel of this layer is for ", rows, " rows, and its plain weights were not given.");
    const bool is_batch = w->dim() == 3;
    const bool is_affine = !is_batch && !layer.steps.empty() && layer.steps[0] == Step::bias;
    Tensor y = is_batch ? at::bmm(x, w->transpose(1, 2))
                        : at::linear(x, *w, is_affine ? bias : std::nullopt);
    for (size_t place = is_affine; place < layer.steps.size(); place++) {
        y = apply_step(layer.steps[place], y, bias, other);
    }
    return y;
}

Tensor linear(const Tensor &x, const Tensor &packed, const std::optional<Tensor> &bias,
              int64_t number, const std::optional<Tensor> &other, const std::optional<Tensor> &w) {
    const LayerEntry &layer = layer_numbered(number);
    const int64_t n = layer.n;
    const Tensor packed_w = checked_packed(layer, packed);
    const bool is_batch = packed.dim() == 2;
    const int64_t batch = is_batch ? packed.size(0) : 1;
    const auto read = [&](const char *name, const Tensor &given, int64_t columns) {
        return is_batch ? batch_of(name, given, batch, columns, layer.type)
                        : rows_of(name, given, columns, layer.type);
    };
    const Rows rows = read("x", x, layer.k);
    c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = n;
    const bool is_empty = rows.count == 0 || batch == 0;
    const KernelEntry *kernel = is_empty ? nullptr : kernel_for(layer, rows.count);
    if (!is_empty && !kernel) {
        return linear_plain(layer, rows.count, x, bias, other, w);
    }
    Tensor y(at::detail::empty_cpu(shape, layer.type));
    if (is_empty) {
        return y;
    }
    gemm_tuner_operand operands[max_operands] = {};
    Rows other_rows{};
    Tensor bias_copy;
    for (size_t place = 0; place < layer.operands.size(); place++) {
        if (layer.operands[place] == Step::bias) {
            const bool is_own = bias && is_batch && bias->dim() == 2 && bias->size(0) == batch;
            TORCH_CHECK(bias && (is_own || bias->dim() == 1) && bias->size(-1) == n &&
                            bias->scalar_type() == layer.type,
                        "bias must be ", n, " elements of ", layer.type,
                        is_batch ? ", or as many for each product." : ".");
            bias_copy = bias->contiguous();
            operands[place].elements = bias_copy.const_data_ptr();
            operands[place].batch_stride = is_own ? n : 0;
        } else {
            TORCH_CHECK(other && other->sizes() == at::IntArrayRef(shape),
                        "other must have the shape of y, ", at::IntArrayRef(shape), ".");
            other_rows = read("other", *other, n);
            operands[place].elements = other_rows.elements;
            operands[place].leading_dimension = other_rows.leading_dimension;
            operands[place].batch_stride = other_rows.batch_stride;
        }
    }
    gemm_tuner_args args = {};
    args.size_bytes = sizeof args;
    args.m = rows.count;
    args.batch = batch;
    args.x = rows.elements;
    args.x_leading_dimension = rows.leading_dimension;
    args.x_batch_stride = rows.batch_stride;
    args.packed_w = static_cast<const char *>(packed_w.const_data_ptr()) + kernel->packed_offset;
    args.packed_w_batch_stride_bytes = is_batch ? layer.packed_bytes : 0;
    args.y = y.mutable_data_ptr();
    args.y_leading_dimension = n;
    args.y_batch_stride = rows.count * n;
    args.operands = operands;
    args.operand_count = layer.operands.size();
    const auto begin = std::chrono::steady_clock::now();
    run_kernel(layer, *kernel, args);
    if (on_call) {
        const auto time = std::chrono::steady_clock::now() - begin;
        on_call(number, &args, std::chrono::nanoseconds(time).count());
    }
    return y;
}

struct Packing {
    const KernelEntry *kernel;
    const gemm_tuner_weights *weights;
    char *packed;
    int32_t parts;
    std::atomic<int32_t> status;
};

void pack_parts(int64_t begin, int64_t end, void *context) {
    Packing &job = *static_cast<Packing *>(context);
    for (int64_t part = begin; part < end; part++) {
        const int32_t status = job.kernel->pack_part(job.weights, job.packed,
                                                     static_cast<int32_t>(part), job.parts);
        if (status != GEMM_TUNER_OK) {
            job.status = status;
        }
    }
}

/* Pack the weights in the threads that will read them, so that new memory lies near each. */
int32_t pack_kernel(const KernelEntry &kernel, const gemm_tuner_weights &weights, char *packed) {
    const int32_t parts = count_parts(kernel);
    if (parts == 1 || !kernel.pack_part) {
        return kernel.pack(&weights, packed);
    }
    Packing job{&kernel, &weights, packed, parts, GEMM_TUNER_OK};
    TORCH_CHECK(torch_parallel_for(0, parts, 1, pack_parts, &job) == 0,
                "gemm-tuner: PyTorch could not pack weights in its threads.");
    return job.status;
}

/* Pack the weights of one product, in each format that a kernel of the layer reads. */
void pack_product(const LayerEntry &layer, const Tensor &w, char *packed) {
    const Rows rows = rows_of("w", w, layer.k, layer.type);
    gemm_tuner_weights weights = {};
    weights.size_bytes = sizeof weights;
    weights.elements = rows.elements;
    weights.leading_dimension = rows.leading_dimension;
    if (on_pack) {
        on_pack(layer.number, &weights);
    }
    for (const KernelEntry &kernel : layer.kernels) {
        if (kernel.is_packer) {
            TORCH_CHECK(pack_kernel(kernel, weights, packed + kernel.packed_offset) ==
                            GEMM_TUNER_OK,
                        "a kernel of layer ", layer.number,
                        " refused the weights; tune it again.");
        }
    }
}

Tensor pack(const Tensor &w, int64_t size_bytes, int64_t number) {
    const LayerEntry &layer = layer_numbered(number);
    TORCH_CHECK((w.dim() == 2 || w.dim() == 3) && w.size(-2) == layer.n, "w has the shape ",
                w.sizes(), "; it must be (", layer.n, ", ", layer.k, "), or a batch of these.");
    TORCH_CHECK(size_bytes == layer.packed_bytes, "layer ", number, " packs ", layer.packed_bytes,
                " bytes, not ", size_bytes, ".");
    const bool is_batch = w.dim() == 3;
    const int64_t batch = is_batch ? w.size(0) : 1;
    Tensor packed = empty_weights(batch * size_bytes);
    char *memory = static_cast<char *>(packed.mutable_data_ptr());
    for (int64_t product = 0; product < batch; product++) {
        pack_product(layer, is_batch ? w.select(0, product) : w, memory + product * size_bytes);
    }
    return is_batch ? packed.view({batch, size_bytes}) : packed;
}

Tensor linear_meta(const Tensor &x, const Tensor &packed, const std::optional<Tensor> &,
                   int64_t number, const std::optional<Tensor> &, const std::optional<Tensor> &) {
    TORCH_CHECK(packed.scalar_type() == at::kByte, "packed must be what gemm_tuner::pack returned.");
    c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
    TORCH_CHECK(!shape.empty(), "x must have at least one dimension.");
    TORCH_CHECK(packed.dim() == 1 || shape.size() == 3, "x must be (batch, rows, columns).");
    shape.back() = layer_numbered(number).n;
    return at::empty_symint(shape, x.options());
}

Tensor pack_meta(const Tensor &w, int64_t size_bytes, int64_t) {
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

/* There is no derivative: who wants one gets an error, never a result without it. */
template <typename... Tensors> void check_not_recorded(const Tensors &...tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!(is_recorded(tensors) || ...),
                                "gemm_tuner's operators have no derivative; call them under "
                                "torch.no_grad(), and train with the plain layer.");
}

Tensor linear_autograd(const Tensor &x, const Tensor &packed, const std::optional<Tensor> &bias,
                       int64_t number, const std::optional<Tensor> &other,
                       const std::optional<Tensor> &w) {
    check_not_recorded(x, bias, other, w);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("gemm_tuner::linear", "")
                               .typed<decltype(linear)>();
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, packed, bias, number, other, w);
}

Tensor pack_autograd(const Tensor &w, int64_t size_bytes, int64_t number) {
    check_not_recorded(w);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("gemm_tuner::pack", "")
                               .typed<decltype(pack)>();
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(w, size_bytes, number);
}

/* A tensor of plain memory on the CPU: no wrapper, no view that is negated or conjugated. */
bool is_plain(const Tensor &tensor, at::ScalarType type) {
    constexpr c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                         c10::DispatchKey::AutocastCPU,
                                         c10::DispatchKey::ADInplaceOrView});
    return (tensor.key_set().raw_repr() & ~plain.raw_repr()) == 0 && tensor.scalar_type() == type &&
           !is_recorded(tensor);
}

bool is_taken(const LayerEntry &layer, const Tensor &x, const Tensor &weight,
              const std::optional<Tensor> &bias) {
    const bool wants_bias = !layer.operands.empty();
    return is_plain(x, layer.type) && is_plain(weight, layer.type) &&
           (!bias || (is_plain(*bias, layer.type) && bias->dim() == 1 &&
                      bias->size(0) == layer.n)) && bias.has_value() == wants_bias &&
           weight.dim() == 2 && weight.size(0) == layer.n && weight.size(1) == layer.k &&
           weight.is_contiguous() && x.dim() >= 1 && x.size(-1) == layer.k &&
           kernel_for(layer, x.numel() / layer.k) &&
           !at::autocast::is_autocast_enabled(at::kCPU);
}

/* What a module calls: whatever no kernel is for, and whatever is recorded, traced, transformed or
 * cast, is computed as torch.nn.Linear does. */
Tensor linear_or_plain(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias,
                       const Tensor &packed, int64_t number) {
    const LayerEntry &layer = layer_numbered(number);
    if (!is_taken(layer, x, weight, bias)) {
        return at::linear(x, weight, bias);
    }
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("gemm_tuner::linear", "")
                               .typed<decltype(linear)>();
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, packed, bias, number, std::nullopt, std::nullopt);
}

void read_layers(std::string folder) { gemm_tuner_layers::read(folder, add_layer); }

} // namespace

TORCH_LIBRARY(gemm_tuner, library) {
    library.def("pack(Tensor w, int size_bytes, int layer) -> Tensor",
                {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
    library.def("linear(Tensor x, Tensor packed, Tensor? bias, int layer, Tensor? other=None, "
                "Tensor? w=None) -> Tensor",
                {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
    library.def("linear_or_plain(Tensor x, Tensor weight, Tensor? bias, Tensor packed, int layer) "
                "-> Tensor",
                {at::Tag::pt2_compliant_tag});
    library.def("read_layers(str folder) -> ()");
}

TORCH_LIBRARY_IMPL(gemm_tuner, CompositeImplicitAutograd, library) {
    library.impl("linear_or_plain", linear_or_plain);
    library.impl("read_layers", read_layers);
}

TORCH_LIBRARY_IMPL(gemm_tuner, CPU, library) {
    library.impl("pack", pack);
    library.impl("linear", linear);
}

TORCH_LIBRARY_IMPL(gemm_tuner, Meta, library) {
    library.impl("pack", pack_meta);
    library.impl("linear", linear_meta);
}

TORCH_LIBRARY_IMPL(gemm_tuner, Autograd, library) {
    library.impl("pack", pack_autograd);
    library.impl("linear", linear_autograd);
}

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
