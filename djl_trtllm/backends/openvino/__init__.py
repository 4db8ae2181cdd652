"""OpenVINO GenAI on the CPU."""

import sys

# The import of openvino, its converter and NNCF report their use to Google Analytics, by forked processes and with an
# identifier in ~/intel, unless this package is missing.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # as Python notes what is missing
