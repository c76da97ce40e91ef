// BMP: the uncompressed kinds people have (1, 4, 8, 24 and 32 bits a pixel); the others are refused by name.
#include "data/image_codec.h"

#include <algorithm>

namespace gemtune {
namespace {

constexpr size_t kFileHeader = 14, kOs2Header = 12, kInfoHeader = 40;
enum Compression : uint32_t { kNone = 0, kBitFields = 3 };

struct BmpLayout {
  int64_t width = 0;
  int64_t height = 0;
  bool top_down = false;
  uint32_t bits = 0;
  uint32_t compression = kNone;
  size_t palette_at = 0;
  size_t palette_entry_bytes = 4;
  size_t num_colours = 0;
  size_t pixels_at = 0;
  bool has_alpha = false;
};

BmpLayout read_layout(std::string_view s, const std::string& where) {
  if (s.size() < kFileHeader + kOs2Header) throw damaged_image(where, "bmp", "it has no complete header");
  BmpLayout layout;
  layout.pixels_at = load_le32(s, 10);
  const size_t header_bytes = load_le32(s, kFileHeader);
  if (header_bytes == kOs2Header) {
    layout.width = load_le16(s, 18);
    layout.height = load_le16(s, 20);
    layout.bits = load_le16(s, 24);
    layout.palette_entry_bytes = 3;
  } else {
    if (header_bytes < kInfoHeader) throw damaged_image(where, "bmp", fmt::format("its header has {} bytes", header_bytes));
    if (header_bytes > s.size() - kFileHeader) throw damaged_image(where, "bmp", "it has no complete header");
    layout.width = static_cast<int32_t>(load_le32(s, 18));
    const int64_t height = static_cast<int32_t>(load_le32(s, 22));
    layout.top_down = height < 0;
    layout.height = layout.top_down ? -height : height;
    layout.bits = load_le16(s, 28);
    layout.compression = load_le32(s, 30);
    layout.num_colours = load_le32(s, 46);
  }
  layout.palette_at = kFileHeader + header_bytes;
  if (layout.bits <= 8) {
    const size_t most = size_t{1} << layout.bits;
    layout.num_colours = layout.num_colours == 0 ? most : std::min(layout.num_colours, most);
  }

  if (layout.compression == kBitFields && layout.bits == 32) {
    // The three or four masks follow the 40 bytes, inside larger headers too.
    constexpr size_t kMasks = kFileHeader + kInfoHeader;
    if (s.size() < kMasks + 12) throw damaged_image(where, "bmp", "it has no complete header");
    layout.has_alpha = header_bytes >= kInfoHeader + 16 && load_le32(s, kMasks + 12) == 0xFF000000;
    if (load_le32(s, kMasks) != 0xFF0000 || load_le32(s, kMasks + 4) != 0xFF00 || load_le32(s, kMasks + 8) != 0xFF) {
      throw unsupported_image(where, "BMP with unusual channel masks");
    }
  } else if (layout.compression != kNone) {
    throw unsupported_image(where, fmt::format("BMP of {} bits a pixel with compression {}", layout.bits, layout.compression));
  }
  for (const uint32_t bits : {1U, 4U, 8U, 24U, 32U}) {
    if (layout.bits == bits) return layout;
  }
  throw unsupported_image(where, fmt::format("BMP of {} bits a pixel", layout.bits));
}

Palette read_palette(std::string_view s, const BmpLayout& layout) {
  Palette palette;
  for (size_t i = 0; i < layout.num_colours; ++i) {
    const size_t at = layout.palette_at + i * layout.palette_entry_bytes;
    if (at + 3 > s.size()) break;
    palette.set(static_cast<int>(i), static_cast<uint8_t>(s[at + 2]), static_cast<uint8_t>(s[at + 1]),
                static_cast<uint8_t>(s[at]));
  }
  return palette;
}

}  // namespace

CodecHeader read_bmp_header(std::string_view s, const std::string& where) {
  const BmpLayout layout = read_layout(s, where);
  CodecHeader header;
  header.width = layout.width;
  header.height = layout.height;
  return header;
}

Raster decode_bmp(std::string_view s, const CodecHeader& header, AlphaChannel alpha, const std::string& where) {
  const BmpLayout layout = read_layout(s, where);
  const size_t width = static_cast<size_t>(layout.width), height = static_cast<size_t>(layout.height);
  const size_t stride = (width * layout.bits + 31) / 32 * 4;
  if (layout.pixels_at > s.size() || s.size() - layout.pixels_at < stride * height) {
    throw damaged_image(where, "bmp",
                        fmt::format("expected {} bytes of pixels, got {}", stride * height,
                                    layout.pixels_at > s.size() ? 0 : s.size() - layout.pixels_at));
  }
  Raster raster = make_raster(header, layout.has_alpha && alpha == AlphaChannel::kKeep ? 4 : 3);
  const Palette palette = layout.bits <= 8 ? read_palette(s, layout) : Palette();
  const uint8_t* const pixels = reinterpret_cast<const uint8_t*>(s.data()) + layout.pixels_at;
  const size_t pixel_bytes = layout.bits / 8;
  for (size_t y = 0; y < height; ++y) {
    const uint8_t* const row = pixels + (layout.top_down ? y : height - 1 - y) * stride;
    uint8_t* out = raster.data.data() + y * width * static_cast<size_t>(raster.channels);
    for (size_t x = 0; x < width; ++x, out += raster.channels) {
      if (layout.bits <= 8) {
        const size_t bit = x * layout.bits;
        const uint8_t index = static_cast<uint8_t>((row[bit / 8] >> (8 - layout.bits - bit % 8)) & ((1U << layout.bits) - 1));
        look_up(palette, &index, 1, 3, out);
        continue;
      }
      const uint8_t* const pixel = row + x * pixel_bytes;
      out[0] = pixel[2], out[1] = pixel[1], out[2] = pixel[0];
      if (raster.channels == 4) out[3] = pixel[3];
    }
  }
  return raster;
}

}  // namespace gemtune
