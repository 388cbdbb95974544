/* The layers of this process: what Python says of them, and how one is found by its number. */

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

/* What Python says of a layer; gemm_tuner/torch/operators.py has the same structure, and the
 * numbers of types and steps. */
struct LayerFacts {
    int64_t number, n_low, n, k, packed_bytes; /* from n_low to n keys; others have n alone */
    int64_t group; /* weights along k with one scale; 0 where they have none */
    int32_t type; /* a row of type_table */
    int32_t w;    /* a number of Weights */
    int32_t step_count;
    int32_t steps[max_steps];
};

#include "layers_file.h"

namespace {

struct LayerEntry : Chain {
    int64_t number, n_low, n, k, packed_bytes, group;
    Weights w;
    bool reads_bias_and_other; /* of floats, at most each once */
    std::vector<KernelEntry> kernels; /* the narrowest range of m first */
    const LayerEntry *next;
    bool is_attention() const { return w == Weights::keys; }
    int64_t groups() const { return group ? (k + group - 1) / group : 0; } /* of each row */
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
    layer->n_low = facts.n_low;
    layer->n = facts.n;
    layer->k = facts.k;
    layer->packed_bytes = facts.packed_bytes;
    layer->group = facts.group;
    layer->types = type_table[facts.type];
    layer->w = static_cast<Weights>(facts.w);
    for (int32_t i = 0; i < facts.step_count; i++) {
        const auto step = static_cast<Step>(facts.steps[i]);
        layer->steps.push_back(step);
        if (reads_operand(step)) {
            layer->operands.push_back(step);
        }
    }
    const auto count = [layer](Step step) {
        return std::count(layer->operands.begin(), layer->operands.end(), step);
    };
    const int64_t biases = count(Step::bias), others = count(Step::add);
    layer->reads_bias_and_other = !layer->types.is_quantised() && biases <= 1 && others <= 1 &&
                                  static_cast<size_t>(biases + others) == layer->operands.size();
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

/* A layer whose weights are packed ahead of calls. */
const LayerEntry &linear_numbered(int64_t number) {
    const LayerEntry &layer = layer_numbered(number);
    TORCH_CHECK(layer.w == Weights::packed, "layer ", number, " is ",
                layer.is_attention() ? "attention, which attention computes."
                                     : "a product of two activations, which matmul computes.");
    return layer;
}

} // namespace
