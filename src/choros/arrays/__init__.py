"""Adapters for the frameworks' arrays, chosen by an array's type: an array shows that its framework is imported."""

from choros.arrays.adapter import (
    ArrayAdapter,
    ArrayFunction,
    ArraySpec,
    DeviceArrayAdapter,
    HostFunction,
    NumpyArrays,
    adapter_of,
    device_adapter,
    framework_adapter,
)
