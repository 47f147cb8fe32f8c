#!/usr/bin/env bash
# On a machine with a CUDA device: the tests marked gpu, then the GPU benchmark. Under five minutes.
#   python -m pip install -e ".[test,cupy]" && tests/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python - <<'PYTHON'
import sys
try:
    import cupy
    print("device:", cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "CuPy", cupy.__version__)
except ImportError:
    sys.exit('CuPy is not installed: python -m pip install -e ".[test,cupy]"')
except cupy.cuda.runtime.CUDARuntimeError as error:
    sys.exit(f"CuPy finds no device: {error}")
PYTHON
timeout 200 python -m pytest -q -m gpu tests/test_libraries.py tests/test_core.py
timeout 100 python -m tests.gpu_speed
