// GIF: the first frame on its canvas, through giflib. Frames may reach beyond the screen size the file declares; the canvas
// then grows to hold the first one, as in the reference.
#include "data/image_codec.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include <gif_lib.h>

namespace gemtune {
namespace {

constexpr size_t kScreenBytes = 13, kDescriptorBytes = 9;

size_t colour_table_bytes(uint8_t flags) {
  return (flags & 0x80) != 0 ? size_t{3} << ((flags & 7) + 1) : 0;
}

// Past a chain of length-prefixed blocks, or npos.
size_t skip_blocks(std::string_view s, size_t at) {
  while (at < s.size()) {
    const size_t length = static_cast<uint8_t>(s[at]);
    at += 1 + length;
    if (length == 0) return at;
  }
  return std::string_view::npos;
}

// Position of the next image descriptor's content, or npos.
size_t find_image(std::string_view s, size_t at) {
  while (at < s.size()) {
    const char kind = s[at++];
    if (kind == ',') return at + kDescriptorBytes <= s.size() ? at : std::string_view::npos;
    if (kind == ';') return std::string_view::npos;
    if (kind == '!') at = skip_blocks(s, at + 1);
  }
  return std::string_view::npos;
}

struct GifCloser {
  void operator()(GifFileType* gif) const { DGifCloseFile(gif, nullptr); }
};
using GifHandle = std::unique_ptr<GifFileType, GifCloser>;

int read_bytes(GifFileType* gif, GifByteType* out, int count) {
  auto& rest = *static_cast<std::string_view*>(gif->UserData);
  const size_t n = std::min(rest.size(), static_cast<size_t>(std::max(count, 0)));
  std::memcpy(out, rest.data(), n);
  rest.remove_prefix(n);
  return static_cast<int>(n);
}

struct FrameStart {
  int transparent = -1;  // palette index, or none
};

// Reads records up to and including the first image descriptor.
FrameStart seek_first_frame(GifFileType* gif, const std::string& where) {
  FrameStart start;
  GifRecordType record = UNDEFINED_RECORD_TYPE;
  while (true) {
    if (DGifGetRecordType(gif, &record) == GIF_ERROR) throw damaged_image(where, "gif", "it holds no frame");
    if (record == IMAGE_DESC_RECORD_TYPE) {
      if (DGifGetImageDesc(gif) == GIF_ERROR) throw damaged_image(where, "gif", "its first frame cannot be opened");
      return start;
    }
    if (record != EXTENSION_RECORD_TYPE) throw damaged_image(where, "gif", "it holds no frame");
    int code = 0;
    GifByteType* block = nullptr;
    if (DGifGetExtension(gif, &code, &block) == GIF_ERROR) throw damaged_image(where, "gif", "an extension is cut short");
    if (code == GRAPHICS_EXT_FUNC_CODE && block != nullptr && block[0] >= 4 && (block[1] & 1) != 0) start.transparent = block[4];
    while (block != nullptr) {
      if (DGifGetExtensionNext(gif, &block) == GIF_ERROR) throw damaged_image(where, "gif", "an extension is cut short");
    }
  }
}

// Rows arrive in four passes when a frame is interlaced.
std::vector<int> row_order(int height, bool interlaced) {
  std::vector<int> rows;
  rows.reserve(static_cast<size_t>(height));
  constexpr int kStart[] = {0, 4, 2, 1}, kStep[] = {8, 8, 4, 2};
  for (int pass = 0; interlaced && pass < 4; ++pass) {
    for (int y = kStart[pass]; y < height; y += kStep[pass]) rows.push_back(y);
  }
  for (int y = 0; !interlaced && y < height; ++y) rows.push_back(y);
  return rows;
}

}  // namespace

CodecHeader read_gif_header(std::string_view s, const std::string& where) {
  if (s.size() < kScreenBytes) throw damaged_image(where, "gif", "it has no complete header");
  CodecHeader header;
  header.width = load_le16(s, 6);
  header.height = load_le16(s, 8);
  const size_t frame = find_image(s, kScreenBytes + colour_table_bytes(static_cast<uint8_t>(s[10])));
  if (frame == std::string_view::npos) throw damaged_image(where, "gif", "it holds no frame");
  header.width = std::max<int64_t>(header.width, load_le16(s, frame) + load_le16(s, frame + 4));
  header.height = std::max<int64_t>(header.height, load_le16(s, frame + 2) + load_le16(s, frame + 6));
  // Past the frame's colour table, code size and data.
  const size_t data = frame + kDescriptorBytes + colour_table_bytes(static_cast<uint8_t>(s[frame + 8])) + 1;
  const size_t next = skip_blocks(s, data);
  header.animated = next != std::string_view::npos && find_image(s, next) != std::string_view::npos;
  return header;
}

Raster decode_gif(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where) {
  std::string_view rest = encoded;
  int error = 0;
  const GifHandle gif(DGifOpen(&rest, read_bytes, &error));
  if (gif == nullptr) throw damaged_image(where, "gif", "its header cannot be read");
  const FrameStart start = seek_first_frame(gif.get(), where);
  const GifImageDesc& frame = gif->Image;
  const int64_t left = frame.Left, top = frame.Top;
  if (left < 0 || top < 0 || frame.Width < 0 || frame.Height < 0 || left + frame.Width > header.width ||
      top + frame.Height > header.height) {
    throw damaged_image(where, "gif", "its first frame has two positions");
  }

  const size_t canvas_width = static_cast<size_t>(header.width);
  std::vector<uint8_t> indices(canvas_width * static_cast<size_t>(header.height),
                               static_cast<uint8_t>(std::max(start.transparent, 0)));
  for (const int y : row_order(frame.Width == 0 ? 0 : frame.Height, frame.Interlace)) {
    uint8_t* const row = indices.data() + static_cast<size_t>(top + y) * canvas_width + static_cast<size_t>(left);
    if (DGifGetLine(gif.get(), row, frame.Width) == GIF_ERROR) {
      throw damaged_image(where, "gif", "its first frame's pixels are incomplete");
    }
  }

  Palette palette;
  const ColorMapObject* map = frame.ColorMap != nullptr ? frame.ColorMap : gif->SColorMap;
  for (int i = 0; i < 256; ++i) {
    const uint8_t grey = static_cast<uint8_t>(i);
    if (map == nullptr) palette.set(i, grey, grey, grey);  // no colour table at all: indices are grey values, as in the reference
    if (map != nullptr && i < map->ColorCount) palette.set(i, map->Colors[i].Red, map->Colors[i].Green, map->Colors[i].Blue);
  }
  if (start.transparent >= 0) palette.rgba[start.transparent][3] = 0;
  Raster raster = make_raster(header, alpha == AlphaChannel::kKeep && start.transparent >= 0 ? 4 : 3);
  look_up(palette, indices.data(), indices.size(), raster.channels, raster.data.data());
  return raster;
}

}  // namespace gemtune
