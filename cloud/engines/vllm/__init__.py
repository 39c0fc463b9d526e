"""The vLLM engine: our plans and our sampling, vLLM's model runner, attention and KV cache. See docs/vllm.md."""

import os

# vLLM reads these when it is imported, which any module of this package does.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is a library here: no process of its own
    "VLLM_HOST_IP": "127.0.0.1",  # its process group has one member
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the number of threads is ours to set
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(_name, _value)
