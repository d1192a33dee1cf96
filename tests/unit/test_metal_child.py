"""The child that asks Metal, against an Objective-C runtime of the tests': real calls of C through every message.

docs/mac-checklist.md asks for evidence from a Mac.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpulayer.gpu import metal_child
from gpulayer.gpu.discovery_child import Report

GIB = 1 << 30
FIRST_DEVICE, FIRST_NAME, ARRAY = 100, 200, 50
_MESSAGE = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)

M2_MAX: dict[str, Any] = {
    "name": "Apple M2 Max",
    "recommendedMaxWorkingSetSize": 22906503168,
    "maxBufferLength": 17179869184,
    "hasUnifiedMemory": 1,
    "isLowPower": 0,
    "supportsFamily:": {1001, 1007, 1008, 2002},
}
AMD: dict[str, Any] = {**M2_MAX, "name": "AMD Radeon Pro 5500M", "hasUnifiedMemory": 0, "supportsFamily:": {2002}}


@dataclass
class Runtime:
    """Objects by number: the array, its devices, and their names; nil answers 0 to every message."""

    devices: Sequence[dict[str, Any]]
    listed: bool = True
    selectors: list[bytes] = field(default_factory=list)
    texts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.objc_msgSend = _MESSAGE(self.answer)
        self.texts = [ctypes.create_string_buffer((device["name"] or "").encode()) for device in self.devices]

    def sel_registerName(self, name: bytes) -> int:  # noqa: N802
        if name not in self.selectors:
            self.selectors.append(name)
        return self.selectors.index(name) + 1

    def answer(self, target: int | None, selector: int, argument: int) -> int:
        word = self.selectors[selector - 1].decode()
        if target is None:
            return 0
        if target == ARRAY:
            return len(self.devices) if word == "count" else FIRST_DEVICE + argument
        if target >= FIRST_NAME:
            return ctypes.addressof(self.texts[target - FIRST_NAME]) if word == "UTF8String" else 0
        return self.answer_of_device(target - FIRST_DEVICE, word, argument)

    def answer_of_device(self, place: int, word: str, argument: int) -> int:
        device = self.devices[place]
        if word == "respondsToSelector:":
            return int(self.selectors[argument - 1].decode() in device)
        if word == "name":
            return FIRST_NAME + place if device["name"] else 0
        found: Any = device[word]
        return int(argument in found) if word == "supportsFamily:" else int(found)

    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """What the child writes of this machine."""

        class Function:
            """A function of C: how it is to be called can be set."""

            def __init__(self, call: Any) -> None:
                self.call = call

            def __call__(self, *words: Any) -> Any:
                return self.call(*words)

        class Library:
            sel_registerName = Function(self.sel_registerName)  # noqa: N815
            objc_msgSend = self.objc_msgSend  # noqa: N815
            MTLCopyAllDevices = Function(lambda: ARRAY if self.listed else None)
            MTLCreateSystemDefaultDevice = Function(lambda: FIRST_DEVICE if self.devices else None)

        monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
        read_end, write_end = os.pipe()
        metal_child.main(Report(write_end))
        os.close(write_end)
        with os.fdopen(read_end) as answer:
            said = dict(map(json.loads, answer))
        devices: list[dict[str, Any]] = said["devices"]
        return devices


def test_what_metal_says_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Runtime([M2_MAX, AMD]).asked(monkeypatch)
    figures = {"working_set": 22906503168, "max_buffer": 16 * GIB}
    assert first == {"name": "Apple M2 Max", **figures, "unified": True, "low_power": False, "family": "apple8"}
    assert (second["name"], second["unified"], second["family"]) == ("AMD Radeon Pro 5500M", False, "mac2")


def test_the_default_device_counts_only_where_none_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device["name"] for device in Runtime([M2_MAX], listed=False).asked(monkeypatch)] == ["Apple M2 Max"]
    assert Runtime([], listed=False).asked(monkeypatch) == []
    assert Runtime([]).asked(monkeypatch) == []


def test_what_an_older_macos_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = Runtime([{"name": None, "isLowPower": 1}]).asked(monkeypatch)
    unknown = dict.fromkeys(("name", "working_set", "max_buffer", "unified", "family"))
    assert device == {**unknown, "low_power": True}
