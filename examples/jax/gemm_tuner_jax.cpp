// The kernels of a bundle as a custom call of XLA, for JAX on the CPU: see linear.py beside this.
//
//     c++ -O2 -std=c++17 -fPIC -shared -Ibundle -I"$(python -c 'import jax; print(jax.ffi.include_dir())')" \
//         gemm_tuner_jax.cpp bundle/gemm_tuner_bundle.o -ldl -o libgemm_tuner_jax.so
//
// A layer is packed once and found by a name, which is an attribute of the call: so a program that
// XLA compiled and kept in a cache finds it in the next process, too. The parts of a call run on
// XLA's own threads.
#include "gemm_tuner_bundle.h"
#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ffi = xla::ffi;

namespace {

struct Layer {
    const gemm_tuner_layer *kernels;
    gemm_tuner_packed *packed;
    int64_t n, k;
    size_t element_bytes;
    std::vector<std::byte> bias;
};

// Layers stay as long as the process: compiled programs name them.
std::shared_mutex mutex;
std::map<std::string, std::unique_ptr<const Layer>, std::less<>> layers;

const Layer *find(std::string_view name) {
    std::shared_lock lock(mutex);
    auto found = layers.find(name);
    return found == layers.end() ? nullptr : found->second.get();
}

// The parts of one call. Who comes takes the next part; the caller takes part itself, so a call ends
// even where no other thread of the pool is free, and waits for those parts that others took.
class Parts {
  public:
    Parts(int32_t count, void (*task)(void *, int32_t), void *data)
        : count_(count), task_(task), data_(data) {}

    void take() {
        for (int32_t part; (part = next_++) < count_;) {
            task_(data_, part);
            if (++done_ == count_) {
                std::lock_guard lock(mutex_);
                all_done_.notify_all();
            }
        }
    }

    void wait() {
        std::unique_lock lock(mutex_);
        all_done_.wait(lock, [this] { return done_ == count_; });
    }

  private:
    int32_t count_;
    void (*task_)(void *, int32_t);
    void *data_;
    std::atomic<int32_t> next_{0}, done_{0};
    std::mutex mutex_;
    std::condition_variable all_done_;
};

void run_on_threads_of_xla(void *pool, int32_t parts, void (*task)(void *, int32_t), void *data) {
    auto &threads = *static_cast<ffi::ThreadPool *>(pool);
    auto shared = std::make_shared<Parts>(parts, task, data);
    const auto others = std::min<int64_t>(parts, threads.num_threads()) - 1;
    for (int64_t i = 0; i < others; ++i) threads.Schedule([shared] { shared->take(); });
    shared->take();
    shared->wait();
}

// y (..., n) = epilogue(x (..., k) @ w.T + bias), `rows` at a time: what jax.vmap adds before them is
// a batch.
ffi::Error linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                  std::string_view name, int64_t rows) {
    const Layer *layer = find(name);
    if (layer == nullptr)
        return ffi::Error(ffi::ErrorCode::kNotFound,
                          "no layer " + std::string(name) + " was added in this process");
    const auto of_layer = [&](const ffi::AnyBuffer &buffer, int64_t columns) {
        return buffer.dimensions().size() > 0 && buffer.dimensions().back() == columns &&
               buffer.size_bytes() == buffer.element_count() * layer->element_bytes;
    };
    if (rows < 1 || !of_layer(x, layer->k) || !of_layer(*y, layer->n) ||
        x.element_count() % (rows * layer->k) != 0 ||
        x.element_count() / layer->k != y->element_count() / layer->n)
        return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                          "layer " + std::string(name) +
                              " has another shape or type in this process");
    gemm_tuner_operand bias{};
    bias.elements = layer->bias.data();
    bias.leading_dimension = layer->n;
    gemm_tuner_args args{};
    args.size_bytes = sizeof args;
    args.m = rows;
    args.batch = static_cast<int64_t>(x.element_count()) / (rows * layer->k);
    args.x_batch_stride = rows * layer->k;
    args.y_batch_stride = rows * layer->n;
    args.x = x.untyped_data();
    args.x_leading_dimension = layer->k;
    args.y = y->untyped_data();
    args.y_leading_dimension = layer->n;
    args.operands = &bias;
    args.operand_count = layer->bias.empty() ? 0 : 1;
    const int32_t status = gemm_tuner_layer_run(layer->kernels, layer->packed, &args, 0,
                                                run_on_threads_of_xla, &threads);
    if (status == GEMM_TUNER_OK) return ffi::Error::Success();
    const std::string why = status == GEMM_TUNER_NO_KERNEL ? " has no kernel for m = "
                                                           : " refused its arguments for m = ";
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "layer " + std::string(name) + why + std::to_string(rows));
}

} // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gemm_tuner_linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("layer")
                                  .Attr<int64_t>("rows"));

// Pack the weights (n, k) of a layer of a bundle under a name of its own, with a bias of n elements
// or NULL; elements take so many bytes. Returns what is wrong, or NULL.
extern "C" const char *gemm_tuner_jax_add(const char *name, const gemm_tuner_bundle *bundle,
                                          const char *text, const void *w, int64_t n, int64_t k,
                                          size_t element_bytes, const void *bias,
                                          size_t bias_bytes) {
    std::unique_lock lock(mutex);
    if (layers.count(name) != 0) return "a layer with this name was added before";
    const gemm_tuner_layer *kernels = gemm_tuner_bundle_find(bundle, text);
    if (kernels == nullptr) return "the bundle has no such layer";
    gemm_tuner_weights weights{};
    weights.size_bytes = sizeof weights;
    weights.elements = w;
    weights.leading_dimension = k;
    gemm_tuner_packed *packed = gemm_tuner_layer_pack(kernels, &weights);
    if (packed == nullptr) return "the layer has no kernel that this CPU can run";
    const auto *bytes = static_cast<const std::byte *>(bias);
    std::vector<std::byte> kept(bytes, bytes + bias_bytes);
    layers[name] = std::make_unique<Layer>(
        Layer{kernels, packed, n, k, element_bytes, std::move(kept)});
    return nullptr;
}
