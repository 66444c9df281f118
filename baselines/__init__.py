"""Engines and figures that this suite compares with; imports neither engine nor conformance."""
