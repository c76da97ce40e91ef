"""Decoded and resized pixels against Pillow and the Gemma 3 image processor."""

import io
import os
import pathlib
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.gemma3.image_processing_gemma3_fast import Gemma3ImageProcessorFast

TOOL = pathlib.Path(os.environ["GEMTUNE_BUILD_DIR"]) / "tests" / "gemtune_image"
ORIENTATION = 0x0112


def run_tool(paths, *arguments):
    """One (pixels or None, error, animated) a path."""
    done = subprocess.run([TOOL, *arguments, *paths], stdout=subprocess.PIPE, check=True)
    stream, answers = io.BytesIO(done.stdout), []
    for _ in paths:
        line = stream.readline().decode().rstrip("\n")
        if line.startswith("ok "):
            width, height, num_bytes, _, animated = line.split(" ")[1:]
            pixels = np.frombuffer(stream.read(int(num_bytes)), np.uint8)
            answers.append((int(width), int(height), pixels, int(animated)))
        else:
            answers.append(line)
    assert not stream.read(1)
    return answers


def decoded(paths, *arguments):
    for path, answer in zip(paths, run_tool(paths, *arguments), strict=True):
        assert not isinstance(answer, str), answer
        width, height, pixels, _ = answer
        yield path, pixels.reshape(height, width, 3)


def photo(width, height, seed=0):
    """Smooth colour fields, edges and noise: what JPEG's filters and the resize's weights react to."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = [127 + 120 * np.sin(x / (7 + 5 * c) + seed) * np.cos(y / (11 + 3 * c)) for c in range(3)]
    picture = np.stack(planes, axis=-1)
    picture[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 60)
    picture += rng.normal(0, 12, picture.shape)
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


def with_alpha(image, seed=1):
    alpha = np.random.default_rng(seed).integers(0, 256, (image.height, image.width), dtype=np.uint8)
    image = image.convert("RGBA")
    image.putalpha(Image.fromarray(alpha))
    return image


def jpeg_files(folder):
    for size in ((64, 48), (37, 53), (1, 1), (200, 150), (17, 1)):
        for progressive in (False, True):
            for subsampling in (0, 1, 2):
                for quality in (30, 75, 95, 100):
                    path = folder / f"{size}-{progressive}-{subsampling}-{quality}.jpg"
                    photo(*size).save(path, progressive=progressive, subsampling=subsampling, quality=quality)
                    yield path
    for mode in ("L", "CMYK", "1"):
        path = folder / f"{mode}.jpg"
        photo(61, 47).convert(mode).save(path, quality=90)
        yield path
    path = folder / "rgb.jpg"
    photo(61, 47).save(path, quality=90, keep_rgb=True)
    yield path
    path = folder / "restart.jpg"
    photo(161, 147).save(path, quality=90, restart_marker_rows=1, optimize=True)
    yield path


def png_files(folder):
    rgb = photo(61, 47)
    images = {"RGB": rgb, "RGBA": with_alpha(rgb), "L": rgb.convert("L"), "LA": with_alpha(rgb).convert("LA"), "1": rgb.convert("1")}
    for name, image in images.items():
        image.save(folder / f"{name}.png")
        yield folder / f"{name}.png"
    for bits, colours in ((1, 2), (2, 4), (4, 16), (8, 200)):
        path = folder / f"P{bits}.png"
        rgb.quantize(colours).save(path, bits=bits)
        yield path
        path = folder / f"P{bits}-transparent.png"
        rgb.quantize(colours).save(path, bits=bits, transparency=bytes(range(colours)))
        yield path
    for name, transparency in (("RGB", rgb.getpixel((3, 3))), ("L", rgb.convert("L").getpixel((3, 3)))):
        path = folder / f"{name}-colour-key.png"
        rgb.convert(name).save(path, transparency=transparency)
        yield path


def webp_files(folder):
    rgb = photo(61, 47)
    for name, image in (("RGB", rgb), ("RGBA", with_alpha(rgb))):
        for settings in ({"lossless": True}, {"lossless": True, "exact": True}, {"quality": 80}, {"quality": 20, "method": 6}):
            path = folder / f"{name}-{'-'.join(f'{k}{v}' for k, v in settings.items())}.webp"
            image.save(path, **settings)
            yield path
    frames = [photo(50, 40, seed) for seed in range(3)]
    for name, settings in (("lossless", {"lossless": True}), ("lossy", {"quality": 70})):
        frames[0].save(folder / f"animated-{name}.webp", save_all=True, append_images=frames[1:], **settings)
        yield folder / f"animated-{name}.webp"


def gif_files(folder):
    rgb = photo(61, 47)
    rgb.quantize(256).save(folder / "plain.gif", interlace=False)
    rgb.quantize(100).save(folder / "interlaced.gif", interlace=True)
    rgb.convert("L").save(folder / "grey.gif")
    rgb.convert("1").save(folder / "bilevel.gif")
    rgb.quantize(64).save(folder / "transparent.gif", transparency=7)
    frames = [photo(50, 40, seed).quantize(32) for seed in range(3)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:], disposal=2, transparency=3)
    yield from sorted(folder.glob("*.gif"))


def tiff_files(folder):
    rgb = photo(61, 47)
    compressions = ("raw", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "packbits", "zstd", "lzma")
    for compression in compressions:
        for mode in ("RGB", "L", "RGBA", "CMYK", "P", "1", "LA"):
            image = with_alpha(rgb).convert(mode) if "A" in mode else rgb.quantize(99) if mode == "P" else rgb.convert(mode)
            image.save(folder / f"{mode}-{compression}.tif", compression=compression)
    for compression in ("group3", "group4", "tiff_ccitt"):
        rgb.convert("1").save(folder / f"{compression}.tif", compression=compression)
    for mode in ("RGB", "L", "YCbCr"):
        rgb.convert(mode).save(folder / f"{mode}-jpeg.tif", compression="jpeg", quality=90)
    rgb.save(folder / "predictor.tif", compression="tiff_lzw", tiffinfo={317: 2})
    photo(400, 300).save(folder / "strips.tif", compression="tiff_lzw", strip_size=4096)
    rgb.save(folder / "big.tif", big_tiff=True)
    with_alpha(rgb).save(folder / "associated.tif", tiffinfo={338: 1})
    rgb.save(folder / "pages.tif", save_all=True, append_images=[photo(20, 20, 5)])
    yield from sorted(folder.glob("*.tif"))


def bmp_files(folder):
    rgb = photo(61, 47)
    for mode in ("RGB", "L", "P", "1", "RGBA"):
        image = rgb.quantize(99) if mode == "P" else with_alpha(rgb) if mode == "RGBA" else rgb.convert(mode)
        image.save(folder / f"{mode}.bmp")
        yield folder / f"{mode}.bmp"


@pytest.mark.parametrize("make", [jpeg_files, png_files, webp_files, gif_files, tiff_files, bmp_files])
def test_decoded_pixels_are_pillows(make, tmp_path):
    paths = list(make(tmp_path))
    assert len(paths) >= 5
    for path, ours in decoded(paths):
        np.testing.assert_array_equal(ours, np.asarray(Image.open(path).convert("RGB")), err_msg=path.name)


def test_sixteen_bits_are_scaled(tmp_path):
    ramp = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    paths = [tmp_path / "grey.png", tmp_path / "grey.tif"]
    for path in paths:
        Image.fromarray(ramp).save(path)
    for path, ours in decoded(paths):
        np.testing.assert_array_equal(ours, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2), err_msg=path.name)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_orientations_are_pillows(suffix, tmp_path):
    paths = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        path = tmp_path / f"{orientation}.{suffix}"
        photo(40, 24).save(path, exif=exif)
        paths.append(path)
    for path, ours in decoded(paths):
        expected = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        np.testing.assert_array_equal(ours, np.asarray(expected), err_msg=path.name)
    for path, ours in decoded(paths, "--exif", "ignore"):
        np.testing.assert_array_equal(ours, np.asarray(Image.open(path).convert("RGB")), err_msg=path.name)


@pytest.mark.parametrize("ground", ["white", "black"])
def test_composites_are_pillows(ground, tmp_path):
    rgba = with_alpha(photo(61, 47))
    rgba.save(tmp_path / "a.png")
    rgba.save(tmp_path / "a.tif")
    rgba.save(tmp_path / "a.webp", lossless=True, exact=True)
    rgba.convert("LA").save(tmp_path / "la.png")
    photo(61, 47).quantize(64).save(tmp_path / "p.png", transparency=bytes(range(0, 256, 4)))
    photo(61, 47).quantize(64).save(tmp_path / "p.gif", transparency=7)
    photo(61, 47).save(tmp_path / "key.png", transparency=photo(61, 47).getpixel((3, 3)))
    photo(61, 47).save(tmp_path / "opaque.jpg")
    for path, ours in decoded(sorted(p for p in tmp_path.iterdir()), "--alpha", ground):
        top = Image.open(path).convert("RGBA")
        under = Image.new("RGB", top.size, ground)
        under.paste(top, mask=top.getchannel("A"))
        np.testing.assert_array_equal(ours, np.asarray(under), err_msg=path.name)


SIZES = [(1024, 1024), (640, 427), (300, 1200), (896, 896), (895, 897), (50, 40), (1, 1000), (2000, 1500)]


@pytest.mark.parametrize("target", [896, 224, 56])
def test_resized_pixels_are_the_processors(target, tmp_path):
    paths = []
    for width, height in SIZES:
        paths.append(tmp_path / f"{width}x{height}.png")
        photo(width, height, seed=width).save(paths[-1], compress_level=1)
    processor = Gemma3ImageProcessorFast(
        size={"height": target, "width": target}, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_pan_and_scan=False
    )
    for path, (_, _, pixels, _) in zip(paths, run_tool(paths, "--size", str(target)), strict=True):
        ours = pixels.reshape(3, target, target)
        image = Image.open(path).convert("RGB")
        levels = processor(image, return_tensors="pt", do_normalize=False, do_rescale=False)["pixel_values"][0]
        worst = np.abs(ours.astype(int) - levels.numpy().astype(int)).max()
        assert worst <= 1, f"{path.name}: {worst} levels"
        # The values the tower sees are one function of the levels, exactly.
        values = processor(image, return_tensors="pt")["pixel_values"][0]
        assert torch.equal(values, (levels.float() - 127.5) / 127.5)
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            assert worst == 0, f"{path.name}: the 8-bit path is exact"


def test_constant_pictures_stay_constant(tmp_path):
    paths = []
    for size in ((1, 1), (7, 1000), (1500, 3)):
        paths.append(tmp_path / f"{size}.png")
        Image.new("RGB", size, (200, 100, 50)).save(paths[-1])
    for _, _, pixels, _ in run_tool(paths, "--size", "896"):
        for plane, value in zip(pixels.reshape(3, -1), (200, 100, 50), strict=True):
            assert (plane == value).all()


def test_cut_files_are_errors(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    photo(200, 150).save(whole / "a.jpg")
    photo(200, 150).save(whole / "b.jpg", progressive=True)
    photo(200, 150).save(whole / "c.png")
    photo(200, 150).save(whole / "d.webp")
    photo(200, 150).quantize(64).save(whole / "e.gif")
    photo(200, 150).save(whole / "f.tif", compression="tiff_lzw")
    photo(200, 150).save(whole / "g.tif", compression="jpeg")
    photo(200, 150).save(whole / "h.bmp")
    paths = []
    for path in sorted(whole.iterdir()):
        content = path.read_bytes()
        for percent in (0, 1, 10, 30, 60, 90, 99):
            paths.append(tmp_path / f"{percent}-{path.name}")
            paths[-1].write_bytes(content[: len(content) * percent // 100])
    for path, answer in zip(paths, run_tool(paths), strict=True):
        assert isinstance(answer, str) and answer.startswith(f"error {path}: "), path.name
