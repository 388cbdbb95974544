/* The operators as C functions, which code that torch.compile writes with `cpp_wrapper` calls: to
 * look an operator up by its name and to go twice through PyTorch's dispatcher takes longer than a
 * small layer. gemm_tuner/torch/inductor/lowering.py has their declarations. Arguments are those of the
 * operators, in their order: an array is an at::Tensor, one that may lack a pointer to it, and a
 * list is followed by its length. */
#include <torch/csrc/inductor/aoti_torch/utils.h>

namespace {

/* An array as PyTorch's dispatcher would give it: itself, not what stands for it. */
std::optional<Tensor> given_array(const AtenTensorHandle *handle) {
    return torch::aot_inductor::resolve_tensor_dispatch_flags(handle);
}

Tensor given_array(AtenTensorHandle handle) {
    return torch::aot_inductor::resolve_tensor_dispatch_flags(handle);
}

/* Give what a function computes, or PyTorch's code for an error, whose text is printed. */
template <typename Compute> AOTITorchError give(AtenTensorHandle *y, const Compute &compute) {
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE(
        { *y = torch::aot_inductor::new_tensor_handle(compute()); });
}

} // namespace

extern "C" __attribute__((visibility("default"))) AOTITorchError
aoti_torch_cpu_gemm_tuner_linear(AtenTensorHandle x, AtenTensorHandle packed,
                                 const AtenTensorHandle *bias, int64_t layer,
                                 const AtenTensorHandle *other, const AtenTensorHandle *w,
                                 AtenTensorHandle *y) {
    return give(y, [&] {
        return linear(given_array(x), given_array(packed), given_array(bias), layer,
                      given_array(other), given_array(w));
    });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError
aoti_torch_cpu_gemm_tuner_fused_linear(AtenTensorHandle x, AtenTensorHandle packed,
                                       const AtenTensorHandle *const *operands,
                                       int64_t operand_count, const double *numbers,
                                       int64_t number_count, int64_t layer,
                                       const AtenTensorHandle *w, AtenTensorHandle *y) {
    return give(y, [&] {
        c10::List<std::optional<Tensor>> arrays;
        arrays.reserve(static_cast<size_t>(operand_count));
        for (int64_t place = 0; place < operand_count; place++) {
            arrays.push_back(given_array(operands[place]));
        }
        return fused_linear(given_array(x), given_array(packed), arrays,
                            {numbers, static_cast<size_t>(number_count)}, layer, given_array(w));
    });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError
aoti_torch_cpu_gemm_tuner_patches(AtenTensorHandle x, const int64_t *kernel, int64_t kernel_count,
                                  const int64_t *stride, int64_t stride_count,
                                  const int64_t *padding, int64_t padding_count,
                                  const int64_t *dilation, int64_t dilation_count,
                                  AtenTensorHandle *rows) {
    return give(rows, [&] {
        return patches(given_array(x), {kernel, static_cast<size_t>(kernel_count)},
                       {stride, static_cast<size_t>(stride_count)},
                       {padding, static_cast<size_t>(padding_count)},
                       {dilation, static_cast<size_t>(dilation_count)});
    });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError
aoti_torch_cpu_gemm_tuner_matmul(AtenTensorHandle x, AtenTensorHandle w, int64_t layer,
                                 const AtenTensorHandle *bias, const AtenTensorHandle *other,
                                 double scale, AtenTensorHandle *y) {
    return give(y, [&] {
        return matmul(given_array(x), given_array(w), layer, given_array(bias),
                      given_array(other), scale);
    });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError
aoti_torch_cpu_gemm_tuner_grouped_matmul(AtenTensorHandle x, AtenTensorHandle w,
                                         AtenTensorHandle ends, int64_t layer,
                                         AtenTensorHandle *y) {
    return give(y, [&] {
        return grouped_matmul(given_array(x), given_array(w), given_array(ends), layer);
    });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError
aoti_torch_cpu_gemm_tuner_attention(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                                    int64_t layer, const AtenTensorHandle *mask, double scale,
                                    AtenTensorHandle *y) {
    return give(y, [&] {
        return attention(given_array(q), given_array(k), given_array(v), layer,
                         given_array(mask), scale);
    });
}
