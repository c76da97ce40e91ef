"""Writes the small images beside this file; src/data/image_test.cpp tells what each is for. Needs Pillow 12."""

import pathlib

from PIL import Image

HERE = pathlib.Path(__file__).parent
ORIENTATION = 0x0112


def quadrants(width=32, height=16):
    """Red, green / blue, white: every flip and turn of it looks different."""
    image = Image.new("RGB", (width, height), "white")
    image.paste((255, 0, 0), (0, 0, width // 2, height // 2))
    image.paste((0, 255, 0), (width // 2, 0, width, height // 2))
    image.paste((0, 0, 255), (0, height // 2, width // 2, height))
    return image


def pattern(size=32):
    image = Image.new("RGB", (size, size))
    image.putdata([(x * 8, y * 8, (x * 37 + y * 91) % 256) for y in range(size) for x in range(size)])
    return image


def main():
    exif = Image.Exif()
    exif[ORIENTATION] = 7
    turned = quadrants()
    turned.save(HERE / "turned.jpg", quality=95, subsampling=0, exif=exif)
    turned.save(HERE / "turned.png", exif=exif)
    turned.save(HERE / "turned.webp", lossless=True, exif=exif)
    turned.save(HERE / "turned.tif", tiffinfo={ORIENTATION: 7})

    photo = pattern()
    photo.save(HERE / "baseline.jpg", quality=85)
    photo.save(HERE / "progressive.jpg", quality=85, progressive=True)
    photo.save(HERE / "photo.png")
    photo.save(HERE / "lossy.webp", quality=80)
    photo.save(HERE / "lzw.tif", compression="tiff_lzw")
    photo.quantize(64).save(HERE / "photo.gif")
    photo.save(HERE / "photo.bmp")

    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(HERE / "cmyk_red.jpg", quality=95)
    Image.new("RGBA", (8, 8), (200, 100, 50, 128)).save(HERE / "half_transparent.png")
    Image.new("RGBA", (8, 8), (200, 100, 50, 128)).save(HERE / "half_transparent.webp", lossless=True, exact=True)
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(HERE / "animated.webp", save_all=True, append_images=frames[1:], lossless=True, duration=100)
    frames[0].save(HERE / "animated.png", save_all=True, append_images=frames[1:], duration=100)


if __name__ == "__main__":
    main()
