"""vLLM behind what is no HTTP server of ours: offline prompts, and DJL Serving's worker in both modes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from djl_trtllm import LLM, SamplingParams
from tests.integration.djl.engines import MODES, JavaEngine
from tests.support.client import lmi
from tests.support.models import PROMPT, link_checkpoint
from tests.support.server import Server
from tests.vllm.conftest import FILE, ON_CPU

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TEMPLATES = Path(__file__).parents[2] / "serving" / "djl"
TOKENS = 12


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    return str(server.answer(PROMPT, max_new_tokens=TOKENS)["generated_text"])


def test_offline_prompts_have_the_servers_text(model: Path, expected: str) -> None:
    with LLM(model) as llm:
        first, again = llm.generate([PROMPT, PROMPT], SamplingParams(max_tokens=TOKENS, temperature=0))
    assert first.outputs[0].text == again.outputs[0].text == expected


@pytest.mark.parametrize("mode", MODES)
def test_djls_worker_has_the_servers_text(tmp_path: Path, expected: str, mode: str) -> None:
    # The file that users of DJL Serving start from; DJL reads its entry point, and the modes, there.
    lines = (TEMPLATES / mode / "serving.properties").read_text().splitlines()
    own = {line.partition("=")[0] for line in lines}
    lines += [line for line in FILE.splitlines() if line.partition("=")[0] not in own]
    directory = link_checkpoint(tmp_path / "story")
    (directory / "serving.properties").write_text("\n".join([*lines, "option.backend=vllm"]))
    with JavaEngine(directory) as engine:
        answers = [engine.request(orjson.dumps(lmi(PROMPT, max_new_tokens=TOKENS))) for _ in range(2)]
        for answer in answers:
            assert orjson.loads(answer.wait().body)["generated_text"] == expected
