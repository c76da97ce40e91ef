// PNG through libpng's low-level interface, and the PNG writer for pictures people look at.
#include "data/image.h"
#include "data/image_codec.h"

#include <cstdio>
#include <cstring>

#include <png.h>

namespace gemtune {
namespace {

// As in image_jpeg.cpp: functions with setjmp own nothing that needs a destructor.
class PngReader {
 public:
  explicit PngReader(std::string_view encoded) : rest_(encoded) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, &PngReader::on_error, [](png_structp, png_const_charp) {});
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
  }
  ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  bool is_open() const { return info_ != nullptr; }

  bool read_header() {
    if (setjmp(png_jmpbuf(png_))) return false;
    png_set_read_fn(png_, this, [](png_structp png, png_bytep out, size_t count) {
      PngReader& reader = *static_cast<PngReader*>(png_get_io_ptr(png));
      if (count > reader.rest_.size()) png_error(png, "the data end too early");
      std::memcpy(out, reader.rest_.data(), count);
      reader.rest_.remove_prefix(count);
    });
    png_set_user_limits(png_, 0x7fffffff, 0x7fffffff);
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, 0);
    png_read_info(png_, info_);
    return true;
  }

  // Asks for 8 bits a channel, and RGB or RGBA unless the file has a palette (then indices).
  bool choose_output(AlphaChannel alpha) {
    if (setjmp(png_jmpbuf(png_))) return false;
    const int type = png_get_color_type(png_, info_);
    has_transparency_ = png_get_valid(png_, info_, PNG_INFO_tRNS) != 0;
    if (type == PNG_COLOR_TYPE_PALETTE) {
      png_set_packing(png_);
      channels_ = 1;
    } else {
      const bool stored = (type & PNG_COLOR_MASK_ALPHA) != 0;
      const bool keep = alpha == AlphaChannel::kKeep && (stored || has_transparency_);
      if (keep && !stored) png_set_tRNS_to_alpha(png_);
      if (!keep && stored) png_set_strip_alpha(png_);
      if (png_get_bit_depth(png_, info_) < 8) png_set_expand_gray_1_2_4_to_8(png_);
      // numerics: 16-bit samples keep their high byte; the reference clips 16-bit grey to white instead.
      if (png_get_bit_depth(png_, info_) == 16) png_set_strip_16(png_);
      if ((type & PNG_COLOR_MASK_COLOR) == 0) png_set_gray_to_rgb(png_);
      channels_ = keep ? 4 : 3;
    }
    num_passes_ = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != static_cast<size_t>(channels_) * png_get_image_width(png_, info_)) {
      png_error(png_, "unexpected row size");
    }
    return true;
  }

  // All rows, then the checksum of the last data chunk and the end chunk.
  bool read_rows(uint8_t* out) {
    if (setjmp(png_jmpbuf(png_))) return false;
    const size_t row_bytes = png_get_rowbytes(png_, info_);
    const png_uint_32 height = png_get_image_height(png_, info_);
    for (int pass = 0; pass < num_passes_; ++pass) {
      for (png_uint_32 y = 0; y < height; ++y) png_read_row(png_, out + y * row_bytes, nullptr);
    }
    png_read_end(png_, nullptr);
    return true;
  }

  Palette palette() const {
    Palette result;
    png_colorp colours = nullptr;
    int num_colours = 0;
    png_get_PLTE(png_, info_, &colours, &num_colours);
    for (int i = 0; i < num_colours && i < 256; ++i) result.set(i, colours[i].red, colours[i].green, colours[i].blue);
    png_bytep alpha = nullptr;
    int num_alpha = 0;
    if (has_transparency_) png_get_tRNS(png_, info_, &alpha, &num_alpha, nullptr);
    for (int i = 0; alpha != nullptr && i < num_alpha && i < 256; ++i) result.rgba[i][3] = alpha[i];
    return result;
  }

  int64_t width() const { return png_get_image_width(png_, info_); }
  int64_t height() const { return png_get_image_height(png_, info_); }
  int channels() const { return channels_; }  // 1: indices into the palette
  bool has_transparency() const { return has_transparency_; }
  const char* message() const { return message_; }

 private:
  [[noreturn]] static void on_error(png_structp png, png_const_charp text) {
    PngReader& reader = *static_cast<PngReader*>(png_get_error_ptr(png));
    std::snprintf(reader.message_, sizeof reader.message_, "%s", text);
    png_longjmp(png, 1);
  }

  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::string_view rest_;
  int channels_ = 0;
  int num_passes_ = 1;
  bool has_transparency_ = false;
  char message_[160] = "";
};

class PngWriter {
 public:
  PngWriter() {
    png_ = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, [](png_structp, png_const_charp) {});
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
  }
  ~PngWriter() { png_destroy_write_struct(&png_, &info_); }
  PngWriter(const PngWriter&) = delete;
  PngWriter& operator=(const PngWriter&) = delete;

  bool write(const uint8_t* rgb, int width, int height) {
    if (info_ == nullptr || setjmp(png_jmpbuf(png_))) return false;
    png_set_write_fn(
        png_, this,
        [](png_structp png, png_bytep bytes, size_t count) {
          if (!static_cast<PngWriter*>(png_get_io_ptr(png))->append(bytes, count)) png_error(png, "out of memory");
        },
        [](png_structp) {});
    png_set_IHDR(png_, info_, static_cast<png_uint_32>(width), static_cast<png_uint_32>(height), 8, PNG_COLOR_TYPE_RGB,
                 PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    png_write_info(png_, info_);
    for (int y = 0; y < height; ++y) png_write_row(png_, rgb + static_cast<size_t>(y) * static_cast<size_t>(width) * 3);
    png_write_end(png_, nullptr);
    return true;
  }
  std::string take() { return std::move(out_); }

 private:
  bool append(const uint8_t* bytes, size_t count) noexcept {
    try {
      out_.append(reinterpret_cast<const char*>(bytes), count);
      return true;
    } catch (...) {
      return false;
    }
  }

  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::string out_;
};

}  // namespace

CodecHeader read_png_header(std::string_view s, const std::string& where) {
  constexpr size_t kSignature = 8, kAround = 12;  // length, type and checksum around a chunk's content
  if (s.size() < 33 || s.substr(12, 4) != "IHDR" || load_be32(s, kSignature) != 13) {
    throw damaged_image(where, "png", "it has no header chunk");
  }
  CodecHeader header;
  header.width = load_be32(s, 16);
  header.height = load_be32(s, 20);
  for (size_t at = kSignature; at + kAround <= s.size();) {
    const size_t length = load_be32(s, at);
    if (length > s.size() - at - kAround) break;
    const std::string_view type = s.substr(at + 4, 4), content = s.substr(at + 8, length);
    if (type == "acTL" && content.size() >= 4) header.animated = load_be32(content, 0) > 1;
    if (type == "eXIf") header.orientation = exif_orientation(content);
    at += kAround + length;
  }
  return header;
}

Raster decode_png(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where) {
  PngReader reader(encoded);
  if (!reader.is_open()) throw environment_error("{}: out of memory for the PNG reader", where);
  if (!reader.read_header() || !reader.choose_output(alpha)) throw damaged_image(where, "png", reader.message());
  if (reader.width() != header.width || reader.height() != header.height) {
    throw damaged_image(where, "png", "it has two header chunks");
  }
  Raster raster = make_raster(header, reader.channels());
  if (!reader.read_rows(raster.data.data())) throw damaged_image(where, "png", reader.message());
  if (raster.channels != 1) return raster;
  Raster coloured = make_raster(header, alpha == AlphaChannel::kKeep && reader.has_transparency() ? 4 : 3);
  look_up(reader.palette(), raster.data.data(), raster.data.size(), coloured.channels, coloured.data.data());
  return coloured;
}

std::string encode_png(const RgbImage& image) {
  PngWriter writer;
  if (!writer.write(image.data.data(), image.width, image.height)) {
    throw environment_error("a PNG of {} x {} pixels could not be written: out of memory", image.width, image.height);
  }
  return writer.take();
}

std::string encode_png(const std::vector<uint8_t>& planes_CHW, int size) {
  const size_t plane = static_cast<size_t>(size) * static_cast<size_t>(size);
  RgbImage image{size, size, std::vector<uint8_t>(plane * 3)};
  for (size_t i = 0; i < plane; ++i) {
    for (size_t c = 0; c < 3; ++c) image.data[i * 3 + c] = planes_CHW[c * plane + i];
  }
  return encode_png(image);
}

}  // namespace gemtune
