from __future__ import annotations

from djl_trtllm.config.sources.origin import Origin, OriginKind

ORIGINS = {
    OriginKind.FILE: Origin.file("serving.properties", 3),
    OriginKind.ENVIRONMENT: Origin.environment("HF_MODEL_ID"),
    OriginKind.DEFAULT: Origin.default(),
    OriginKind.DERIVED: Origin.derived("option.max_num_tokens=5"),
    OriginKind.OVERRIDE: Origin.override("command line --port"),
}


def test_each_kind_has_its_origin() -> None:
    assert {kind: origin.kind for kind, origin in ORIGINS.items()} == {kind: kind for kind in OriginKind}


def test_an_origin_says_where() -> None:
    assert {kind: str(origin) for kind, origin in ORIGINS.items()} == {
        OriginKind.FILE: "serving.properties:3",
        OriginKind.ENVIRONMENT: "environment variable HF_MODEL_ID",
        OriginKind.DEFAULT: "default",
        OriginKind.DERIVED: "derived from option.max_num_tokens=5",
        OriginKind.OVERRIDE: "command line --port",
    }


def test_a_person_set_what_is_neither_default_nor_derived() -> None:
    assert {kind for kind, origin in ORIGINS.items() if origin.is_user} == {
        OriginKind.FILE,
        OriginKind.ENVIRONMENT,
        OriginKind.OVERRIDE,
    }


def test_programs_read_a_word_and_a_line() -> None:
    assert (Origin.file("f", 3).where, Origin.file("f", 3).line) == ("f", 3)
    assert (Origin.environment("A").where, Origin.environment("A").line) == ("A", None)
    assert [kind.value for kind in OriginKind] == ["file", "environment", "default", "derived", "override"]


def test_a_preset_is_no_persons_and_is_known_as_one() -> None:
    preset = Origin.preset("Truss")
    assert str(preset) == "derived from the presets of Truss"
    assert preset.is_preset and not preset.is_user
    assert not Origin.derived("option.max_num_tokens=4096").is_preset
    assert not Origin.override("the presets of mine").is_preset
