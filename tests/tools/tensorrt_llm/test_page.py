from __future__ import annotations

from djl_trtllm.backends.tensorrt_llm.names import all_members, owners
from tools.tensorrt_llm.page import names_page


def test_the_page_has_every_owner_and_name() -> None:
    page = names_page()
    assert [name for name in owners() if f"\n## {name}\n" not in page] == []
    assert page.count("\n| `") == len(all_members())
