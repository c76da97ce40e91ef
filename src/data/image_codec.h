// What the codec files share. Nothing outside src/data/image*.cpp includes this.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

// Read without allocating pixels. Sizes are as stored, before orientation.
struct CodecHeader {
  int64_t width = 0;
  int64_t height = 0;
  int orientation = 1;  // EXIF's 1..8
  bool animated = false;
};

enum class AlphaChannel { kSkip, kKeep };

// Decoded pixels as stored: 3 channels (RGB), or 4 (RGBA, not premultiplied) when alpha was wanted and there is some.
struct Raster {
  int width = 0;
  int height = 0;
  int channels = 3;
  std::vector<uint8_t> data;
};

// Every codec: the header first (it checks nothing about limits), then the pixels. `header` is what read_X_header returned for
// the same bytes and has passed the limits; a decoder that finds other sizes in the file throws. Throws Error(kInput).
CodecHeader read_jpeg_header(std::string_view encoded, const std::string& where);
CodecHeader read_png_header(std::string_view encoded, const std::string& where);
CodecHeader read_webp_header(std::string_view encoded, const std::string& where);
CodecHeader read_gif_header(std::string_view encoded, const std::string& where);
CodecHeader read_tiff_header(std::string_view encoded, const std::string& where);
CodecHeader read_bmp_header(std::string_view encoded, const std::string& where);
Raster decode_jpeg(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where);
Raster decode_png(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where);
Raster decode_webp(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where);
Raster decode_gif(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where);
Raster decode_tiff(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where);
Raster decode_bmp(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where);

// Orientation out of an EXIF block (a small TIFF file, with or without the leading "Exif\0\0"); 1 when there is none or it is
// damaged: a broken side note never costs a picture.
int exif_orientation(std::string_view exif);

inline Error damaged_image(const std::string& where, std::string_view format, std::string_view detail) {
  return input_error("{}: the {} file is damaged or cut short: {}; replace the file or set data.on_bad_row=skip", where, format,
                     detail);
}
inline Error unsupported_image(const std::string& where, std::string_view what) {
  return input_error("{}: {} is not read; convert the file to PNG or JPEG", where, what);
}

inline Raster make_raster(const CodecHeader& header, int channels) {
  Raster raster;
  raster.width = static_cast<int>(header.width);
  raster.height = static_cast<int>(header.height);
  raster.channels = channels;
  raster.data.resize(static_cast<size_t>(header.width) * static_cast<size_t>(header.height) * static_cast<size_t>(channels));
  return raster;
}

// A palette of 8-bit RGBA entries. Entries a file does not define are black, as in the reference.
struct Palette {
  uint8_t rgba[256][4];
  Palette() {
    for (int i = 0; i < 256; ++i) set(i, 0, 0, 0);
  }
  void set(int i, uint8_t red, uint8_t green, uint8_t blue) {
    rgba[i][0] = red;
    rgba[i][1] = green;
    rgba[i][2] = blue;
    rgba[i][3] = 255;
  }
};

// Looks `num_pixels` indices up into an interleaved row of 3 or 4 channels.
inline void look_up(const Palette& palette, const uint8_t* indices, size_t num_pixels, int channels, uint8_t* out) {
  for (size_t i = 0; i < num_pixels; ++i) {
    for (int c = 0; c < channels; ++c) *out++ = palette.rgba[indices[i]][c];
  }
}

// One CMYK pixel (0 = no ink) to RGB: the reference's rounding of (255 - K) - ink × (255 - K) ÷ 255.
inline void cmyk_to_rgb(const uint8_t* cmyk, uint8_t* rgb) {
  const int white = 255 - cmyk[3];
  for (int c = 0; c < 3; ++c) {
    const int product = cmyk[c] * white + 128;
    const int value = white - (((product >> 8) + product) >> 8);
    rgb[c] = static_cast<uint8_t>(value < 0 ? 0 : value);
  }
}

// Unaligned loads; the caller has checked that the bytes are there.
inline uint32_t load_le16(std::string_view s, size_t at) {
  return static_cast<uint8_t>(s[at]) | static_cast<uint32_t>(static_cast<uint8_t>(s[at + 1])) << 8;
}
inline uint32_t load_be16(std::string_view s, size_t at) {
  return static_cast<uint8_t>(s[at + 1]) | static_cast<uint32_t>(static_cast<uint8_t>(s[at])) << 8;
}
inline uint32_t load_le32(std::string_view s, size_t at) {
  return load_le16(s, at) | load_le16(s, at + 2) << 16;
}
inline uint32_t load_be32(std::string_view s, size_t at) {
  return load_be16(s, at + 2) | load_be16(s, at) << 16;
}

}  // namespace gemtune
