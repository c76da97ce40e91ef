#include "data/image.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "data/image_codec.h"

#include <limits>

namespace gemtune {
namespace {

struct Codec {
  const char* name;
  CodecHeader (*read_header)(std::string_view, const std::string&);
  Raster (*decode)(std::string_view, const CodecHeader&, AlphaChannel, const std::string&);
  bool orientation_is_exif;  // false: the orientation belongs to the format itself and is applied under kIgnore too
};

constexpr Codec kJpeg{"jpeg", read_jpeg_header, decode_jpeg, true};
constexpr Codec kPng{"png", read_png_header, decode_png, true};
constexpr Codec kWebp{"webp", read_webp_header, decode_webp, true};
constexpr Codec kGif{"gif", read_gif_header, decode_gif, true};
constexpr Codec kTiff{"tiff", read_tiff_header, decode_tiff, false};
constexpr Codec kBmp{"bmp", read_bmp_header, decode_bmp, true};

// Formats people do have in their folders and that gemtune names instead of calling them "not an image".
std::string_view refused_format(std::string_view s) {
  if (s.size() >= 12 && s.substr(4, 4) == "ftyp") {
    const std::string_view brand = s.substr(8, 4);
    if (brand == "avif" || brand == "avis") return "AVIF";
    for (std::string_view heif : {"heic", "heix", "heim", "heis", "hevc", "hevx", "mif1", "msf1"}) {
      if (brand == heif) return "HEIC";
    }
  }
  if (s.starts_with(std::string_view("\0\0\0\x0cJXL ", 8)) || s.starts_with("\xff\x0a")) return "JPEG XL";
  if (s.starts_with(std::string_view("\0\0\0\x0cjP  ", 8)) || s.starts_with("\xff\x4f\xff\x51")) return "JPEG 2000";
  if (s.starts_with("8BPS")) return "Photoshop";
  if (s.starts_with(std::string_view("\0\0\1\0", 4))) return "ICO";
  return "";
}

const Codec& find_codec(std::string_view s, const std::string& where) {
  if (s.starts_with("\xff\xd8\xff")) return kJpeg;
  if (s.starts_with("\x89PNG\r\n\x1a\n")) return kPng;
  if (s.size() >= 12 && s.starts_with("RIFF") && s.substr(8, 4) == "WEBP") return kWebp;
  if (s.starts_with("GIF87a") || s.starts_with("GIF89a")) return kGif;
  for (std::string_view tiff :
       {std::string_view("II*\0", 4), std::string_view("MM\0*", 4), std::string_view("II+\0", 4), std::string_view("MM\0+", 4)}) {
    if (s.starts_with(tiff)) return kTiff;
  }
  if (s.starts_with("BM")) return kBmp;
  if (s.empty()) throw input_error("{}: the image file is empty (0 bytes); replace the file or set data.on_bad_row=skip", where);
  const std::string_view refused = refused_format(s);
  if (!refused.empty()) throw unsupported_image(where, std::string(refused) + " format");
  throw input_error("{}: not an image (the file starts with {}); expected JPEG, PNG, WebP, GIF, TIFF or BMP; replace the file",
                    where, in_quotes(s.substr(0, 16)));
}

struct Checked {
  const Codec* codec;
  CodecHeader header;
};

Checked read_checked_header(std::string_view encoded, const ImageOptions& options, const std::string& where) {
  const Codec& codec = find_codec(encoded, where);
  CodecHeader header = codec.read_header(encoded, where);
  if (header.width <= 0 || header.height <= 0) {
    throw damaged_image(where, codec.name, fmt::format("its size is {} x {}", header.width, header.height));
  }
  constexpr int64_t kMaxSide = std::numeric_limits<int32_t>::max();
  if (header.width > kMaxSide || header.height > kMaxSide || header.width > options.max_pixels / header.height) {
    throw input_error("{}: the image has {} x {} pixels, the limit is {} in all; shrink it or raise image.max_pixels", where,
                      header.width, header.height, options.max_pixels);
  }
  if (codec.orientation_is_exif && options.exif == ExifPolicy::kIgnore) header.orientation = 1;
  return {&codec, header};
}

bool swaps_sides(int orientation) {
  return orientation >= 5;
}

// Rounded (value × alpha + ground × (255 - alpha)) ÷ 255, in place to 3 channels.
void composite(Raster& raster, int ground) {
  const size_t num_pixels = raster.data.size() / 4;
  const uint8_t* in = raster.data.data();
  uint8_t* out = raster.data.data();
  for (size_t i = 0; i < num_pixels; ++i, in += 4, out += 3) {
    const int alpha = in[3];
    for (int c = 0; c < 3; ++c) {
      const int sum = in[c] * alpha + ground * (255 - alpha) + 128;
      out[c] = static_cast<uint8_t>(((sum >> 8) + sum) >> 8);
    }
  }
  raster.data.resize(num_pixels * 3);
  raster.channels = 3;
}

// Output (x, y) is taken from stored pixel origin + x × step_x + y × step_y.
RgbImage orient(Raster&& raster, int orientation) {
  RgbImage image;
  const ptrdiff_t w = raster.width, h = raster.height;
  image.width = static_cast<int>(swaps_sides(orientation) ? h : w);
  image.height = static_cast<int>(swaps_sides(orientation) ? w : h);
  if (orientation == 1) {
    image.data = std::move(raster.data);
    return image;
  }
  ptrdiff_t origin = 0, step_x = 1, step_y = w;
  switch (orientation) {
    case 2:
      origin = w - 1, step_x = -1;
      break;
    case 3:
      origin = w * h - 1, step_x = -1, step_y = -w;
      break;
    case 4:
      origin = w * (h - 1), step_y = -w;
      break;
    case 5:
      step_x = w, step_y = 1;
      break;
    case 6:
      origin = w * (h - 1), step_x = -w, step_y = 1;
      break;
    case 7:
      origin = w * h - 1, step_x = -w, step_y = -1;
      break;
    case 8:
      origin = w - 1, step_x = w, step_y = -1;
      break;
    default:
      break;
  }
  image.data.resize(raster.data.size());
  uint8_t* out = image.data.data();
  for (ptrdiff_t y = 0; y < image.height; ++y) {
    for (ptrdiff_t x = 0; x < image.width; ++x, out += 3) {
      const uint8_t* in = raster.data.data() + (origin + x * step_x + y * step_y) * 3;
      out[0] = in[0], out[1] = in[1], out[2] = in[2];
    }
  }
  return image;
}

}  // namespace

ImageInfo read_image_info(std::string_view encoded, const ImageOptions& options, const std::string& where) {
  const Checked checked = read_checked_header(encoded, options, where);
  ImageInfo info;
  info.format = checked.codec->name;
  info.width = static_cast<int>(checked.header.width);
  info.height = static_cast<int>(checked.header.height);
  if (swaps_sides(checked.header.orientation)) std::swap(info.width, info.height);
  info.animated = checked.header.animated;
  return info;
}

RgbImage decode_image(std::string_view encoded, const ImageOptions& options, const std::string& where) {
  const Checked checked = read_checked_header(encoded, options, where);
  const AlphaChannel alpha = options.alpha == AlphaPolicy::kDrop ? AlphaChannel::kSkip : AlphaChannel::kKeep;
  Raster raster = checked.codec->decode(encoded, checked.header, alpha, where);
  if (raster.channels == 4) composite(raster, options.alpha == AlphaPolicy::kWhite ? 255 : 0);
  return orient(std::move(raster), checked.header.orientation);
}

std::string read_image_bytes(const ImageSource& source) {
  return source.path.empty() ? source.bytes : read_file(source.path);
}

float normalised(uint8_t v) {
  return (static_cast<float>(v) - 127.5F) / 127.5F;
}

}  // namespace gemtune
