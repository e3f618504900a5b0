"""kvbaton: decide, run, prove and operate disaggregated prefill and decode."""

__version__ = "0.1.0"
