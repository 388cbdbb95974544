/* Run a model that was compiled ahead of time, with its kernels, and without Python.
 *
 *   run_model model.pt2 kernels/libgemm_tuner_torch.so ROWS COLUMNS
 *
 * prints the elements of the result for x (ROWS, COLUMNS) from -1 to 1. docs/torch.md says how the
 * two files are made. To build it, with $TORCH the folder of PyTorch's package:
 *
 *   g++ -std=c++20 -O2 -isystem $TORCH/include run_model.cpp -o run_model \
 *       -L$TORCH/lib -Wl,-rpath,$TORCH/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -ldl
 */
#include <ATen/core/Tensor.h>
#include <ATen/ops/linspace.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

int main(int count, char **arguments) {
    if (count != 5) {
        std::fprintf(stderr, "usage: run_model MODEL.pt2 LIBRARY.so ROWS COLUMNS\n");
        return 2;
    }
    /* The operators; they find the kernels in the folder that they lie in. */
    if (!dlopen(arguments[2], RTLD_NOW)) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    try {
        const int64_t rows = std::atoll(arguments[3]), columns = std::atoll(arguments[4]);
        torch::inductor::AOTIModelPackageLoader model(arguments[1]);
        const at::Tensor x = at::linspace(-1, 1, rows * columns).reshape({rows, columns});
        const at::Tensor y = model.run({x}).at(0).contiguous();
        for (int64_t i = 0; i < y.numel(); i++) {
            std::printf("%.9g\n", y.const_data_ptr<float>()[i]);
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
