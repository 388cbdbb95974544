"""A small kernel in portable C++, into which tests plant what a bad candidate does."""

from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.artifact import ABI_VERSION
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.source import Source
from gemm_tuner.resources import templates_dir

PROBLEM = Problem.parse("f32 5x7x3 nk bias+relu")
CANDIDATE = "scalar_f32_1x1 mc5_nc7_kc3 jc_ic_jr_ir"

RIGHT = "y[row * ldy + column] = sum > 0 || sum != sum ? sum : 0;"

_TEMPLATE = r"""
extern "C" {
#define EXPORT __attribute__((visibility("default")))
EXPORT uint32_t gemm_tuner_abi_version() { return ABI_HERE; }
EXPORT const char *gemm_tuner_describe() {
    return "{\"problem\": \"PROBLEM_HERE\", \"candidate\": \"CANDIDATE_HERE\"}";
}
EXPORT uint64_t gemm_tuner_packed_weight_bytes() { return N * K * sizeof(float); }
EXPORT int32_t gemm_tuner_pack_weights(const gemm_tuner_weights *weights, void *packed_w) {
    const float *w = static_cast<const float *>(weights->elements);
    for (int64_t column = 0; column < N; column++)
        for (int64_t p = 0; p < K; p++)
            static_cast<float *>(packed_w)[column * K + p] =
                w[column * weights->leading_dimension + p];
    return GEMM_TUNER_OK;
}
EXPORT int32_t gemm_tuner_pack_weights_part(const gemm_tuner_weights *weights, void *packed_w,
                                            int32_t part, int32_t) {
    return part == 0 ? gemm_tuner_pack_weights(weights, packed_w) : GEMM_TUNER_OK;
}
EXPORT uint64_t gemm_tuner_workspace_bytes(int32_t) { return 0; }
EXPORT int32_t gemm_tuner_preferred_parts() { return 2; }
EXPORT int32_t gemm_tuner_phases() { return 1; }
EXPORT int32_t gemm_tuner_run(const gemm_tuner_args *args, int32_t, int32_t part, int32_t parts) {
    const float *w = static_cast<const float *>(args->packed_w);
    const float *bias = static_cast<const float *>(args->operands[0].elements);
    const int64_t m = args->m, ldx = args->x_leading_dimension, ldy = args->y_leading_dimension;
    (void)m;
    for (int64_t item = 0; item < args->batch; item++) {
    const float *x = static_cast<const float *>(args->x) + item * args->x_batch_stride;
    float *y = static_cast<float *>(args->y) + item * args->y_batch_stride;
    for (int64_t row = part; row < m; row += parts)
        for (int64_t column = 0; column < N; column++) {
            float sum = 0;
            for (int64_t p = 0; p < K; p++) sum += x[row * ldx + p] * w[column * K + p];
            sum += bias[column];
            STATEMENT_HERE
        }
    }
    return GEMM_TUNER_OK;
}
}
"""


def build_planted(
    toolchain: Toolchain,
    statement: str = RIGHT,
    *,
    abi: int = ABI_VERSION,
    problem: str = PROBLEM.text,
) -> Build:
    """Return a kernel for PROBLEM that does `statement` for each element of y."""
    header = (templates_dir() / "abi" / "gemm_tuner.h").read_text()
    sizes = f"enum {{ N = {PROBLEM.n}, K = {PROBLEM.k} }};\n"
    body = (
        _TEMPLATE.replace("ABI_HERE", str(abi))
        .replace("PROBLEM_HERE", problem)
        .replace("CANDIDATE_HERE", CANDIDATE)
        .replace("STATEMENT_HERE", statement)
    )
    source = Source(text=header + sizes + body, abi_version=abi)
    return compile_kernel(source, isa=frozenset(), toolchain=toolchain)
