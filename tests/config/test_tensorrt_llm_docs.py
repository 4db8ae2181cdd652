from __future__ import annotations

from djl_trtllm.config.tensorrt_llm_docs import names_page
from djl_trtllm.config.tensorrt_llm_names import all_members, owners


def test_the_page_has_every_owner_and_name() -> None:
    page = names_page()
    assert [name for name in owners() if f"\n## {name}\n" not in page] == []
    assert page.count("\n| `") == len(all_members())
