"""High dynamic range and wide gamuts as sRGB. In: 16-bit R'G'B' of a transfer and primaries. Out: 8 bits.

PQ (SMPTE ST 2084) and HLG (ARIB STD-B67, at its nominal peak of 1,000 cd/m2, BT.2100) become light, whose largest
component is tone-mapped by BT.2390's curve from 1,000 to 203 cd/m2 (BT.2408's reference white): up to 90 cd/m2 nothing
changes, and hues do not. Primaries become those of BT.709; what lies outside is clipped.
"""

from __future__ import annotations

from typing import Any

PQ, HLG = 16, 18  # AVColorTransferCharacteristic
BT2020, DCI_P3, DISPLAY_P3 = 9, 11, 12  # AVColorPrimaries
WHITES = {DCI_P3: (0.314, 0.351)}  # else D65
D65 = (0.3127, 0.3290)
CHROMATICITIES = {  # of red, green, blue
    1: ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060)),
    BT2020: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)),
    DCI_P3: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
    DISPLAY_P3: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
}
PEAK, SDR_PEAK = 1000.0, 203.0  # cd/m2
LUMINANCE_2020 = (0.2627, 0.6780, 0.0593)
GAMMA = 2.2  # of SDR, there and back: greys stay what they are
CODES = 1 << 16


class WideColours:
    """Converts pictures of one transfer and one set of primaries, by their numbers in FFmpeg (H.273)."""

    HDR = (PQ, HLG)

    def __init__(self, transfer: int, primaries: int) -> None:
        import numpy

        self.transfer, self.primaries = transfer, primaries
        codes = numpy.arange(CODES, dtype=numpy.float64) / (CODES - 1)
        self._light = _LIGHT.get(transfer, lambda signal: signal**GAMMA)(codes).astype(numpy.float32)
        gamut = primaries if primaries in CHROMATICITIES else BT2020
        self._to_bt709 = (numpy.linalg.inv(_to_xyz(1)) @ _to_xyz(gamut)).astype(numpy.float32)
        encode = _srgb if transfer in self.HDR else lambda light: light ** (1 / GAMMA)
        self._encoded = numpy.rint(255 * encode(codes)).astype(numpy.uint8)
        self._mapped = (_bt2390(codes * PEAK) / SDR_PEAK).astype(numpy.float32)

    @staticmethod
    def needed(transfer: int, primaries: int) -> bool:
        """Whether these colours are not shown as they are."""
        return transfer in WideColours.HDR or primaries in (BT2020, DCI_P3, DISPLAY_P3)

    def converted(self, pixels: Any) -> Any:
        """uint16 ``[height, width, 3]`` to uint8."""
        import numpy

        light = self._light[pixels]
        if self.transfer in self.HDR:
            if self.transfer == HLG:  # light of the scene until here
                luminance = light @ numpy.array(LUMINANCE_2020, numpy.float32)
                light *= luminance[..., None] ** numpy.float32(0.2)
            brightest = numpy.minimum(light.max(axis=-1), 1)
            mapped = self._mapped[numpy.rint(brightest * (CODES - 1)).astype(numpy.int32)]
            light *= (mapped / numpy.maximum(brightest, numpy.float32(1e-6)))[..., None]
        shown = numpy.clip(light @ self._to_bt709.T, 0, 1)
        return self._encoded[numpy.rint(shown * (CODES - 1)).astype(numpy.int32)]


def _to_xyz(primaries: int) -> Any:
    """The matrix of linear RGB to XYZ, where white is (1, 1, 1)."""
    import numpy

    columns = numpy.array([(x / y, 1, (1 - x - y) / y) for x, y in CHROMATICITIES[primaries]]).T
    x, y = WHITES.get(primaries, D65)
    return columns * numpy.linalg.solve(columns, numpy.array([x / y, 1, (1 - x - y) / y]))


def _pq(nits: Any) -> Any:
    """PQ's signal of light in cd/m2."""
    power = (nits / 10000) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375


def _from_pq(signal: Any) -> Any:
    """cd/m2."""
    import numpy

    power = signal ** (1 / 78.84375)
    return 10000 * (numpy.maximum(power - 0.8359375, 0) / (18.8515625 - 18.6875 * power)) ** (1 / 0.1593017578125)


def _from_hlg(signal: Any) -> Any:
    """Light of the scene, 1 at most."""
    import numpy

    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return numpy.where(signal <= 0.5, signal**2 / 3, (numpy.exp((signal - c) / a) + b) / 12)


def _bt2390(nits: Any) -> Any:
    """The tone curve of BT.2390 (section 5.4.1, EETF), from ``PEAK`` to ``SDR_PEAK``, black at 0."""
    import numpy

    peak = _pq(PEAK)
    most = _pq(SDR_PEAK) / peak
    knee = 1.5 * most - 0.5
    signal = numpy.minimum(_pq(nits) / peak, 1)
    t = (numpy.maximum(signal, knee) - knee) / (1 - knee)
    bent = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (3 * t**2 - 2 * t**3) * most
    return _from_pq(numpy.where(signal < knee, signal, bent) * peak)


def _srgb(light: Any) -> Any:
    import numpy

    return numpy.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


_LIGHT = {PQ: lambda signal: _from_pq(signal) / PEAK, HLG: _from_hlg}
