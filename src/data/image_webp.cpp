// WebP through libwebp; the first frame of animations through its demuxer, rendered on their canvas.
#include "data/image_codec.h"

#include <memory>

#include <webp/decode.h>
#include <webp/demux.h>

namespace gemtune {
namespace {

const uint8_t* bytes_of(std::string_view s) {
  return reinterpret_cast<const uint8_t*>(s.data());
}

// The content of the first chunk of that name, or "".
std::string_view find_chunk(std::string_view s, std::string_view name) {
  for (size_t at = 12; at + 8 <= s.size();) {
    const size_t length = load_le32(s, at + 4);
    if (length > s.size() - at - 8) break;
    if (s.substr(at, 4) == name) return s.substr(at + 8, length);
    at += 8 + length + (length & 1);
  }
  return "";
}

int count_frames(std::string_view s) {
  int num_frames = 0;
  for (size_t at = 12; at + 8 <= s.size();) {
    const size_t length = load_le32(s, at + 4);
    if (s.substr(at, 4) == "ANMF") ++num_frames;
    if (length > s.size() - at - 8) break;
    at += 8 + length + (length & 1);
  }
  return num_frames;
}

Raster first_frame(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where) {
  const WebPData data{bytes_of(encoded), encoded.size()};
  WebPAnimDecoderOptions options;
  if (WebPAnimDecoderOptionsInit(&options) == 0) throw environment_error("{}: libwebp has another version", where);
  options.color_mode = MODE_RGBA;
  options.use_threads = 0;
  const std::unique_ptr<WebPAnimDecoder, decltype(&WebPAnimDecoderDelete)> decoder(WebPAnimDecoderNew(&data, &options),
                                                                                   &WebPAnimDecoderDelete);
  WebPAnimInfo info{};
  uint8_t* canvas = nullptr;
  int timestamp_ms = 0;
  if (decoder == nullptr || WebPAnimDecoderGetInfo(decoder.get(), &info) == 0 || info.canvas_width != header.width ||
      info.canvas_height != header.height || WebPAnimDecoderGetNext(decoder.get(), &canvas, &timestamp_ms) == 0) {
    throw damaged_image(where, "webp", "its first frame cannot be decoded");
  }
  Raster raster = make_raster(header, alpha == AlphaChannel::kKeep ? 4 : 3);
  const size_t num_pixels = static_cast<size_t>(header.width) * static_cast<size_t>(header.height);
  uint8_t* out = raster.data.data();
  for (size_t i = 0; i < num_pixels; ++i) {
    for (int c = 0; c < raster.channels; ++c) *out++ = canvas[i * 4 + static_cast<size_t>(c)];
  }
  return raster;
}

}  // namespace

CodecHeader read_webp_header(std::string_view s, const std::string& where) {
  WebPBitstreamFeatures features{};
  if (WebPGetFeatures(bytes_of(s), s.size(), &features) != VP8_STATUS_OK) {
    throw damaged_image(where, "webp", "its header cannot be read");
  }
  CodecHeader header;
  header.width = features.width;
  header.height = features.height;
  header.orientation = exif_orientation(find_chunk(s, "EXIF"));
  header.animated = features.has_animation != 0 && count_frames(s) > 1;
  return header;
}

Raster decode_webp(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where) {
  WebPBitstreamFeatures features{};
  if (WebPGetFeatures(bytes_of(encoded), encoded.size(), &features) != VP8_STATUS_OK) {
    throw damaged_image(where, "webp", "its header cannot be read");
  }
  if (features.has_animation != 0) return first_frame(encoded, header, alpha, where);
  Raster raster = make_raster(header, alpha == AlphaChannel::kKeep && features.has_alpha != 0 ? 4 : 3);
  const auto decode = raster.channels == 4 ? WebPDecodeRGBAInto : WebPDecodeRGBInto;
  if (decode(bytes_of(encoded), encoded.size(), raster.data.data(), raster.data.size(), raster.width * raster.channels) ==
      nullptr) {
    throw damaged_image(where, "webp", "its pixels cannot be decoded");
  }
  return raster;
}

}  // namespace gemtune
