"""ONNX Runtime, with a model that PyTorch exported."""

import warnings
from importlib import import_module

from gemm_tuner.models.row import Prepared, Way, Work
from gemm_tuner.models.ways.openvino import arrays_of, tensor_of
from gemm_tuner.scratch import scratch_folder


def _prepare(work: Work) -> Prepared:
    torch, runtime = import_module("torch"), import_module("onnxruntime")
    plain = work.plain()
    inputs = dict(plain.inputs)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = work.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Its threads wait for the next call asleep: other ways have their turn then.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    with scratch_folder("gemm-tuner-onnx-") as folder:
        path = folder / "model.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is older than the other, and needs no package more
            torch.onnx.export(
                *(plain.module, (), path),
                kwargs=inputs,
                dynamo=False,
                input_names=list(inputs),
            )
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    given = dict(zip(names, arrays_of(names, inputs), strict=True))
    return Prepared(
        call=lambda: session.run(None, given),
        outputs=lambda output: [tensor_of(one) for one in output],
    )


ROWS = (
    Way(
        name="onnxruntime",
        wheel="onnxruntime",
        prepare=_prepare,
        install='pip install "gemm-tuner[peers]"',
        also_needs=("onnx",),
        settings={"export": "torch.onnx.export, dynamo=False", "graph": "ORT_ENABLE_ALL"},
        unable={
            "bf16": "its products on a CPU have no bf16",
            "int8": "it multiplies what PyTorch's quantisation made as floats",
            "bf16_s8": "its products on a CPU have no bf16",
            "bf16_u4": "its products on a CPU have no bf16",
        },
    ),
)
