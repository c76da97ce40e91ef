// Encoded image → the pixels the vision tower sees, equal to the reference's fast image processor.
#pragma once

#include "data/row.h"

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gemtune {

enum class AlphaPolicy { kDrop, kWhite, kBlack };  // kDrop = PIL's convert("RGB"): colour channels as stored
enum class ExifPolicy { kApply, kIgnore };

struct ImageOptions {
  AlphaPolicy alpha = AlphaPolicy::kDrop;
  ExifPolicy exif = ExifPolicy::kApply;
  int64_t max_pixels = 178956970;  // width × height refused above this, from the header, before any allocation
};

// 8-bit RGB, interleaved rows: data[(y * width + x) * 3 + channel].
struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> data;
};

struct ImageInfo {
  std::string format;  // "jpeg", "png", "webp", "gif", "tiff", "bmp"
  int width = 0;       // after orientation
  int height = 0;
  bool animated = false;
};

// From the header alone. `where` opens every message. Throws Error(kInput).
ImageInfo read_image_info(std::string_view encoded, const ImageOptions& options, const std::string& where);

// Decodes the first frame completely; a truncated or damaged file is an error, never grey filling. Throws Error(kInput).
RgbImage decode_image(std::string_view encoded, const ImageOptions& options, const std::string& where);

// The file's bytes (read and closed again), or the embedded ones.
std::string read_image_bytes(const ImageSource& source);

// Resizes to size × size (aspect ratio not kept, antialiased bilinear, rounded to 8 bits as the reference does) and
// returns planes: pixels[(channel * size + y) * size + x]. An image of that size already is not resampled.
std::vector<uint8_t> resize_to_planes_CHW(const RgbImage& image, int size);

// The value the tower sees for pixel value v: v / 127.5 - 1, in fp32, as the reference's fused rescale-and-normalise.
float normalised(uint8_t v);

// PNG file of planes as above (for `inspect` and the report).
std::string encode_png(const std::vector<uint8_t>& planes_CHW, int size);
// PNG file of an interleaved image.
std::string encode_png(const RgbImage& image);

}  // namespace gemtune
