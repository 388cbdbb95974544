/* Calls of kernels: their parts in PyTorch's own threads, and the workspace of each thread. */

namespace {

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

/* What the profiler shows: the problem, its operations, and the bytes of x, w, v and y. */
std::string profiled_name(const LayerEntry &layer, const KernelEntry &kernel,
                          const gemm_tuner_args &args) {
    const int64_t m = args.m, batch = args.batch * args.heads;
    const double count_m = static_cast<double>(m), count = static_cast<double>(batch);
    const double n = static_cast<double>(layer.is_attention() ? args.n : layer.n);
    const double k = static_cast<double>(layer.k);
    const auto size = [](at::ScalarType type) { return static_cast<double>(c10::elementSize(type)); };
    const Types &types = layer.types;
    const double products = layer.is_attention() ? 2 : 1; /* as many arrays like w */
    const double columns = layer.is_attention() ? k : n;
    const double bytes = count * (count_m * k * size(types.x) + products * n * k * size(types.w) +
                                  count_m * columns * size(types.y));
    char counts[96];
    std::snprintf(counts, sizeof counts, " (m = %lld, %.6g MFLOP, %.6g MB)",
                  static_cast<long long>(m), 2e-6 * products * count * count_m * n * k, 1e-6 * bytes);
    const std::string many = batch == 1 ? "" : std::to_string(batch) + " of ";
    return "gemm-tuner " + many + kernel.name + counts;
}

void run_kernel(const LayerEntry &layer, const KernelEntry &kernel, gemm_tuner_args &args) {
    at::RecordFunction profiled(at::RecordScope::FUNCTION);
    if (profiled.isActive()) {
        profiled.before(profiled_name(layer, kernel, args));
    }
    const int32_t parts = count_parts(kernel, args.batch * args.heads);
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

/* Run a kernel, and let who watches this thread see it. */
void run_watched(const LayerEntry &layer, const KernelEntry &kernel, gemm_tuner_args &args) {
    if (!on_call) {
        run_kernel(layer, kernel, args);
        return;
    }
    const auto begin = std::chrono::steady_clock::now();
    run_kernel(layer, kernel, args);
    const auto time = std::chrono::steady_clock::now() - begin;
    on_call(layer.number, &args, std::chrono::nanoseconds(time).count());
}

const KernelEntry *kernel_for(const LayerEntry &layer, int64_t rows) {
    for (const KernelEntry &kernel : layer.kernels) {
        if (kernel.m_low <= rows && rows <= kernel.m_high) {
            return &kernel;
        }
    }
    return nullptr;
}

} // namespace
