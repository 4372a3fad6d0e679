"""High dynamic range and wide gamuts become sRGB: nothing is washed out, greys stay grey."""

from fractions import Fraction
from pathlib import Path

import av
import numpy
import pytest

from arachnec.data.shown_picture import BT2020, DISPLAY_P3, HLG, PQ, WideColours
from arachnec.data.video import read_frames

NITS = numpy.array([0.0, 1.0, 10.0, 50.0, 90.0, 203.0, 500.0, 1000.0, 4000.0])


def pq_signal(nits: numpy.ndarray) -> numpy.ndarray:
    """SMPTE ST 2084, equation 5."""
    power = (nits / 10000) ** (2610 / 16384)
    return ((3424 / 4096 + 2413 / 128 * power) / (1 + 2392 / 128 * power)) ** (2523 / 32)


def srgb(light: numpy.ndarray) -> numpy.ndarray:
    low = light <= 0.0031308
    return 255 * numpy.where(low, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def converted(transfer: int, primaries: int, signal: numpy.ndarray) -> numpy.ndarray:
    codes = numpy.rint(signal * 65535).astype(numpy.uint16)
    return WideColours(transfer, primaries).converted(codes.reshape(1, -1, 3))[0].astype(int)


def greys(signal: numpy.ndarray) -> numpy.ndarray:
    return signal[:, None].repeat(3, 1)


def test_pq_keeps_what_is_dark_and_maps_its_peak_to_white() -> None:
    shown = converted(PQ, BT2020, greys(pq_signal(NITS)))
    assert (numpy.ptp(shown, axis=1) <= 1).all()
    numpy.testing.assert_allclose(shown[:5, 0], srgb(NITS[:5] / 203), atol=1)
    assert list(shown[:, 0]) == sorted(shown[:, 0]) and 200 < shown[5, 0] < 245
    assert (shown[NITS >= 1000] == 255).all() and shown[6, 0] < 255


def test_hlg_is_as_bright_as_the_same_light_in_pq() -> None:
    """BT.2408: reference white of 203 cd/m2 is 75 % HLG and 58 % PQ; 38 % of either is 26 cd/m2."""
    hlg = converted(HLG, BT2020, greys(numpy.array([0.0, 0.38, 0.75, 1.0])))
    pq = converted(PQ, BT2020, greys(numpy.array([0.0, 0.38, 0.58, float(pq_signal(numpy.array(1000.0)))])))
    numpy.testing.assert_allclose(hlg, pq, atol=3)


@pytest.mark.parametrize("primaries", [BT2020, DISPLAY_P3])
def test_a_wide_gamut_leaves_greys_and_makes_colours_stronger(primaries: int) -> None:
    levels = numpy.linspace(0, 1, 18)
    numpy.testing.assert_allclose(converted(1, primaries, greys(levels))[:, 0], levels * 255, atol=1)
    ((red, green, blue),) = converted(1, primaries, numpy.array([[0.6, 0.4, 0.4]]))
    assert red > 0.6 * 255 + 3 and green < 0.4 * 255 and blue < 0.4 * 255


def test_a_colour_of_display_p3_is_that_of_srgb() -> None:
    """CSS Color 4: color(display-p3 0.9176 0.2003 0.1386) is sRGB's red. Gamma 2.2 is not quite sRGB's curve."""
    (red,) = converted(13, DISPLAY_P3, numpy.array([[0.9176, 0.2003, 0.1386]]))
    assert red[0] == 255 and max(red[1:]) < 25


@pytest.mark.parametrize(("transfer", "white"), [(PQ, 0.58), (HLG, 0.75)])
def test_a_video_is_converted_by_what_its_stream_says(tmp_path: Path, transfer: int, white: float) -> None:
    path = tmp_path / "bright.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=Fraction(24))
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv444p10le"
        stream.codec_context.color_trc, stream.codec_context.color_primaries = transfer, BT2020
        stream.codec_context.colorspace, stream.codec_context.color_range = 9, 1
        frame = av.VideoFrame(32, 32, "yuv444p10le")
        for plane, level in zip(frame.planes, (64 + 876 * white, 512, 512), strict=True):
            plane.update(numpy.full(plane.buffer_size // 2, round(level), numpy.uint16).tobytes())
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    shown = read_frames(path, 0, 1, 32, 32).numpy()
    expected = converted(transfer, BT2020, numpy.array([[white] * 3]))[0]
    numpy.testing.assert_allclose(shown.reshape(3, -1).mean(1), expected, atol=1.5)
    assert expected.min() > 255 * white + 15  # unconverted, it would be so much darker
