"""OpenVINO GenAI on the CPU."""
