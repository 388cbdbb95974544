// Compute a layer with the kernels of a bundle from many threads at once, each call in parts that
// threads share, and write the result, which must be the same for all.
//
//     c++ -O2 -std=c++17 -pthread -Ibundle call_bundle_threads.cpp libgemm_tuner_bundle.a -ldl
//     ./a.out bundle/kernels 'f32 *x3072x768 nk bias+relu' 128 3072 768 y.bin 4
//
// The layer is y = relu(x @ w.T + bias) in f32, with numbers from a generator.
#include "gemm_tuner_bundle.h"

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace {

std::vector<float> numbers(int64_t count, uint32_t seed) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
    }
    return values;
}

// A runner: as many threads as `pool` says take one part after the other.
void run_in_threads(void *pool, int32_t parts, void (*task)(void *, int32_t), void *data) {
    std::atomic<int32_t> next{0};
    auto work = [&] {
        for (int32_t part; (part = next++) < parts;) task(data, part);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < *static_cast<int *>(pool); ++i) others.emplace_back(work);
    work();
    for (std::thread &each : others) each.join();
}

int fail(const std::string &why) {
    std::cerr << why << '\n';
    return EXIT_FAILURE;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 8) return fail("wrong usage: call_bundle_threads KERNELS LAYER M N K OUT THREADS");
    const int64_t m = std::atoll(argv[3]), n = std::atoll(argv[4]), k = std::atoll(argv[5]);
    int threads = std::atoi(argv[7]);
    char message[512];
    gemm_tuner_bundle *bundle = gemm_tuner_bundle_open(argv[1], message, sizeof message);
    if (!bundle) return fail(message);
    const gemm_tuner_layer *layer = gemm_tuner_bundle_find(bundle, argv[2]);
    if (!layer) return fail("the bundle has no such layer");

    const std::vector<float> x = numbers(m * k, 1), w = numbers(n * k, 2), bias = numbers(n, 3);
    gemm_tuner_weights weights{};
    weights.size_bytes = sizeof weights;
    weights.elements = w.data();
    weights.leading_dimension = k;
    gemm_tuner_packed *packed =
        gemm_tuner_layer_pack_in_parts(layer, &weights, 3, run_in_threads, &threads);
    if (!packed) return fail("the weights cannot be packed");

    std::vector<std::vector<float>> results(static_cast<size_t>(threads), numbers(m * n, 4));
    std::atomic<int> failed{0};
    std::vector<std::thread> callers;
    for (std::vector<float> &y : results)
        callers.emplace_back([&] {
            gemm_tuner_operand operand{};
            operand.elements = bias.data();
            operand.leading_dimension = n;
            gemm_tuner_args args{};
            args.size_bytes = sizeof args;
            args.m = m;
            args.batch = 1;
            args.x = x.data();
            args.x_leading_dimension = k;
            args.y = y.data();
            args.y_leading_dimension = n;
            args.operands = &operand;
            args.operand_count = 1;
            for (int call = 0; call < 20; ++call)
                if (gemm_tuner_layer_run(layer, packed, &args, 3, run_in_threads, &threads) !=
                    GEMM_TUNER_OK)
                    ++failed;
        });
    for (std::thread &each : callers) each.join();
    if (failed) return fail("the kernel refused its arguments");
    for (const std::vector<float> &y : results)
        if (y != results.front()) return fail("two threads got different results");
    std::ofstream file(argv[6], std::ios::binary);
    file.write(reinterpret_cast<const char *>(results.front().data()),
               static_cast<std::streamsize>(results.front().size() * sizeof(float)));
    file.close();
    gemm_tuner_packed_free(packed);
    gemm_tuner_bundle_close(bundle);
    return file ? EXIT_SUCCESS : fail("the result cannot be written");
}
