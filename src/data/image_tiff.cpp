// TIFF through libtiff: first page, strips or tiles, contiguous or separate planes, brought to 8-bit RGB as the reference does.
#include "data/image_codec.h"
#include "data/image_jbig.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>

#include <tiffio.h>

namespace gemtune {
namespace {

constexpr int64_t kMaxSingleAllocation = int64_t{1} << 30;  // for libtiff itself; pixels of ours are bounded by max_pixels

// The file in memory, and the first thing libtiff complained about.
struct Source {
  std::string_view bytes;
  toff_t at = 0;
  std::string message;
  bool cut_short = false;
};

struct TiffCloser {
  void operator()(TIFF* tiff) const { TIFFClose(tiff); }
};
using TiffHandle = std::unique_ptr<TIFF, TiffCloser>;

tmsize_t read_bytes(thandle_t handle, void* out, tmsize_t count) {
  Source& source = *static_cast<Source*>(handle);
  if (count <= 0 || source.at >= source.bytes.size()) return 0;
  const size_t n = std::min(static_cast<size_t>(count), source.bytes.size() - static_cast<size_t>(source.at));
  std::memcpy(out, source.bytes.data() + source.at, n);
  source.at += n;
  return static_cast<tmsize_t>(n);
}

toff_t seek_to(thandle_t handle, toff_t offset, int whence) {
  Source& source = *static_cast<Source*>(handle);
  if (whence == SEEK_SET) source.at = offset;
  if (whence == SEEK_CUR) source.at += offset;
  if (whence == SEEK_END) source.at = source.bytes.size() + offset;
  return source.at;
}

int on_error(TIFF*, void* user, const char*, const char* format, va_list arguments) {
  Source& source = *static_cast<Source*>(user);
  if (source.message.empty()) {
    char text[160];
    std::vsnprintf(text, sizeof text, format, arguments);
    source.message = text;
  }
  return 1;
}

// Codecs inside TIFF fill the rest of a strip with grey and merely warn.
int on_warning(TIFF*, void* user, const char*, const char* format, va_list arguments) {
  char text[160];
  std::vsnprintf(text, sizeof text, format, arguments);
  if (std::strstr(text, "remature") != nullptr) {
    Source& source = *static_cast<Source*>(user);
    source.cut_short = true;
    if (source.message.empty()) source.message = text;
  }
  return 1;
}

TiffHandle open_tiff(Source& source, const std::string& where) {
  const std::unique_ptr<TIFFOpenOptions, decltype(&TIFFOpenOptionsFree)> options(TIFFOpenOptionsAlloc(), &TIFFOpenOptionsFree);
  TIFFOpenOptionsSetMaxSingleMemAlloc(options.get(), kMaxSingleAllocation);
  TIFFOpenOptionsSetErrorHandlerExtR(options.get(), on_error, &source);
  TIFFOpenOptionsSetWarningHandlerExtR(options.get(), on_warning, &source);
  TiffHandle tiff(TIFFClientOpenExt(
      "image", "rm", &source, read_bytes, [](thandle_t, void*, tmsize_t) -> tmsize_t { return 0; }, seek_to,
      [](thandle_t) { return 0; }, [](thandle_t handle) -> toff_t { return static_cast<Source*>(handle)->bytes.size(); },
      [](thandle_t, void**, toff_t*) { return 0; }, [](thandle_t, void*, toff_t) {}, options.get()));
  if (tiff == nullptr) throw damaged_image(where, "tiff", source.message.empty() ? "its header cannot be read" : source.message);
  return tiff;
}

uint32_t tag32(TIFF* tiff, uint32_t tag, uint32_t missing) {
  uint32_t value = missing;
  return TIFFGetField(tiff, tag, &value) == 1 ? value : missing;
}
uint16_t tag16(TIFF* tiff, uint32_t tag) {
  uint16_t value = 0;
  TIFFGetFieldDefaulted(tiff, tag, &value);
  return value;
}

// What the samples of a pixel are, and how many of them matter.
struct Layout {
  uint16_t photometric = 0;
  uint16_t bits = 1;
  uint16_t samples_stored = 1;
  bool separate = false;
  bool has_alpha = false;
  bool premultiplied = false;
  bool through_rgba = false;  // subsampled YCbCr: libtiff's own conversion
  int num_colours() const { return photometric == PHOTOMETRIC_RGB ? 3 : photometric == PHOTOMETRIC_SEPARATED ? 4 : 1; }
  int num_samples() const { return num_colours() + (has_alpha ? 1 : 0); }
};

Layout read_layout(TIFF* tiff, const std::string& where) {
  const uint16_t compression = tag16(tiff, TIFFTAG_COMPRESSION);
  if (compression == COMPRESSION_JBIG) throw unsupported_image(where, kJbigRefusal);
  if (TIFFIsCODECConfigured(compression) == 0) {
    throw unsupported_image(where, fmt::format("TIFF with compression {}", compression));
  }
  Layout layout;
  layout.bits = tag16(tiff, TIFFTAG_BITSPERSAMPLE);
  layout.samples_stored = tag16(tiff, TIFFTAG_SAMPLESPERPIXEL);
  layout.separate = tag16(tiff, TIFFTAG_PLANARCONFIG) == PLANARCONFIG_SEPARATE;
  if (TIFFGetField(tiff, TIFFTAG_PHOTOMETRIC, &layout.photometric) != 1) {
    layout.photometric = layout.samples_stored >= 3 ? PHOTOMETRIC_RGB : PHOTOMETRIC_MINISBLACK;
  }
  const uint16_t format = tag16(tiff, TIFFTAG_SAMPLEFORMAT);
  if (format != SAMPLEFORMAT_UINT && !(format == SAMPLEFORMAT_INT && layout.bits == 8) && format != SAMPLEFORMAT_VOID) {
    throw unsupported_image(where, fmt::format("TIFF with {} samples of {} bits",
                                               format == SAMPLEFORMAT_IEEEFP ? "floating-point" : "signed", layout.bits));
  }
  uint16_t num_extra = 0;
  const uint16_t* extra = nullptr;
  TIFFGetFieldDefaulted(tiff, TIFFTAG_EXTRASAMPLES, &num_extra, &extra);

  if (layout.photometric == PHOTOMETRIC_YCBCR) {
    if (layout.samples_stored == 1) {
      layout.photometric = PHOTOMETRIC_MINISBLACK;
    } else if (compression == COMPRESSION_JPEG && !layout.separate) {
      TIFFSetField(tiff, TIFFTAG_JPEGCOLORMODE, JPEGCOLORMODE_RGB);
      layout.photometric = PHOTOMETRIC_RGB;
    } else {
      layout.through_rgba = true;
      return layout;
    }
  }
  const bool grey = layout.photometric == PHOTOMETRIC_MINISBLACK || layout.photometric == PHOTOMETRIC_MINISWHITE;
  const bool palette = layout.photometric == PHOTOMETRIC_PALETTE;
  const bool colours = layout.photometric == PHOTOMETRIC_RGB || layout.photometric == PHOTOMETRIC_SEPARATED;
  if (!grey && !palette && !colours) {
    throw unsupported_image(where, fmt::format("TIFF with photometric interpretation {}", layout.photometric));
  }
  const bool whole_bytes = layout.bits == 8 || layout.bits == 16;
  const bool small = layout.bits == 1 || layout.bits == 2 || layout.bits == 4;
  const bool known_bits = whole_bytes || (small && !colours) || (layout.bits == 12 && grey);
  if (!known_bits || (palette && layout.bits > 8)) {
    throw unsupported_image(where, fmt::format("TIFF with {} bits a sample", layout.bits));
  }
  if (layout.samples_stored < layout.num_colours()) {
    throw damaged_image(where, "tiff",
                        fmt::format("expected {} samples a pixel, got {}", layout.num_colours(), layout.samples_stored));
  }
  // A fourth sample of RGB is alpha unless the file calls it something else.
  constexpr uint16_t kCorelAlpha = 999;
  if (layout.samples_stored > layout.num_colours() && layout.photometric != PHOTOMETRIC_SEPARATED && layout.bits >= 8) {
    const uint16_t kind = num_extra > 0 ? extra[0] : layout.photometric == PHOTOMETRIC_RGB ? EXTRASAMPLE_UNASSALPHA : 0;
    layout.has_alpha = kind == EXTRASAMPLE_ASSOCALPHA || kind == EXTRASAMPLE_UNASSALPHA || kind == kCorelAlpha;
    layout.premultiplied = kind == EXTRASAMPLE_ASSOCALPHA && layout.photometric == PHOTOMETRIC_RGB;
  }
  return layout;
}

// One sample of a packed row as 8 bits: small grey values are scaled up, wide ones cut down, palette indices left alone.
class SampleReader {
 public:
  SampleReader(const Layout& layout, int samples_in_row) : bits_(layout.bits), per_pixel_(samples_in_row) {
    scale_ = layout.bits < 8 && layout.photometric != PHOTOMETRIC_PALETTE ? 255 / ((1 << layout.bits) - 1) : 1;
  }
  uint8_t operator()(const uint8_t* row, size_t x, size_t sample) const {
    const size_t i = x * static_cast<size_t>(per_pixel_) + sample;
    if (bits_ == 8) return row[i];
    if (bits_ == 16) {
      uint16_t value = 0;
      std::memcpy(&value, row + i * 2, 2);
      return static_cast<uint8_t>(value >> 8);
    }
    if (bits_ == 12) {
      const size_t bit = i * 12;
      return static_cast<uint8_t>(bit % 8 == 0 ? row[bit / 8] : (row[bit / 8] & 15) << 4 | row[bit / 8 + 1] >> 4);
    }
    const size_t bit = i * static_cast<size_t>(bits_);
    return static_cast<uint8_t>(((row[bit / 8] >> (8 - static_cast<size_t>(bits_) - bit % 8)) & ((1 << bits_) - 1)) * scale_);
  }

 private:
  int bits_;
  int per_pixel_;
  int scale_ = 1;
};

[[noreturn]] void throw_damaged(const Source& source, const std::string& where) {
  throw damaged_image(where, "tiff", source.message.empty() ? "its pixels are incomplete" : source.message);
}

// The samples that matter as 8-bit values, interleaved.
std::vector<uint8_t> read_samples(TIFF* tiff, const Source& source, const CodecHeader& header, const Layout& layout,
                                  const std::string& where) {
  const size_t width = static_cast<size_t>(header.width), height = static_cast<size_t>(header.height);
  const size_t num_samples = static_cast<size_t>(layout.num_samples());
  const bool tiled = TIFFIsTiled(tiff) != 0;
  size_t block_width = width, block_height = std::min<size_t>(height, tag32(tiff, TIFFTAG_ROWSPERSTRIP, ~0U));
  if (tiled) {
    block_width = tag32(tiff, TIFFTAG_TILEWIDTH, 0);
    block_height = tag32(tiff, TIFFTAG_TILELENGTH, 0);
  }
  const tmsize_t block_bytes = tiled ? TIFFTileSize(tiff) : TIFFStripSize(tiff);
  const tmsize_t row_bytes = tiled ? TIFFTileRowSize(tiff) : TIFFScanlineSize(tiff);
  const size_t stored = layout.separate ? 1 : layout.samples_stored;
  if (block_width == 0 || block_height == 0 || block_bytes <= 0 || block_bytes > kMaxSingleAllocation ||
      static_cast<size_t>(row_bytes) < (block_width * stored * layout.bits + 7) / 8 ||
      static_cast<size_t>(block_bytes) / static_cast<size_t>(row_bytes) < block_height) {
    throw damaged_image(where, "tiff", "its strips or tiles have an impossible size");
  }

  std::vector<uint8_t> block(static_cast<size_t>(block_bytes));
  std::vector<uint8_t> samples(width * height * num_samples);
  const SampleReader sample_at(layout, static_cast<int>(stored));
  for (size_t plane = 0; plane < (layout.separate ? num_samples : 1); ++plane) {
    for (size_t top = 0; top < height; top += block_height) {
      const size_t rows = std::min(block_height, height - top);
      for (size_t left = 0; left < width; left += block_width) {
        const uint32_t x0 = static_cast<uint32_t>(left), y0 = static_cast<uint32_t>(top);
        const uint16_t s = static_cast<uint16_t>(plane);
        // A last strip that holds fewer rows is complete with them.
        const tmsize_t expected = tiled ? block_bytes : row_bytes * static_cast<tmsize_t>(rows);
        const tmsize_t got = tiled ? TIFFReadEncodedTile(tiff, TIFFComputeTile(tiff, x0, y0, 0, s), block.data(), block_bytes)
                                   : TIFFReadEncodedStrip(tiff, TIFFComputeStrip(tiff, y0, s), block.data(), expected);
        if (got != expected || source.cut_short) throw_damaged(source, where);
        const size_t columns = std::min(block_width, width - left);
        for (size_t y = 0; y < rows; ++y) {
          const uint8_t* const row = block.data() + y * static_cast<size_t>(row_bytes);
          uint8_t* out = samples.data() + ((top + y) * width + left) * num_samples;
          for (size_t x = 0; x < columns; ++x, out += num_samples) {
            if (layout.separate) {
              out[plane] = sample_at(row, x, 0);
            } else {
              for (size_t i = 0; i < num_samples; ++i) out[i] = sample_at(row, x, i);
            }
          }
        }
      }
    }
  }
  return samples;
}

Palette read_palette(TIFF* tiff, const Layout& layout, const std::string& where) {
  uint16_t *red = nullptr, *green = nullptr, *blue = nullptr;
  if (TIFFGetField(tiff, TIFFTAG_COLORMAP, &red, &green, &blue) != 1) {
    throw damaged_image(where, "tiff", "it has palette indices but no palette");
  }
  Palette palette;
  for (int i = 0; i < (1 << layout.bits); ++i) {
    palette.set(i, static_cast<uint8_t>(red[i] >> 8), static_cast<uint8_t>(green[i] >> 8), static_cast<uint8_t>(blue[i] >> 8));
  }
  return palette;
}

void convert_pixel(const Layout& layout, const Palette& palette, const uint8_t* in, uint8_t* out) {
  switch (layout.photometric) {
    case PHOTOMETRIC_MINISWHITE:
      out[0] = out[1] = out[2] = static_cast<uint8_t>(255 - in[0]);
      break;
    case PHOTOMETRIC_MINISBLACK:
      out[0] = out[1] = out[2] = in[0];
      break;
    case PHOTOMETRIC_PALETTE:
      look_up(palette, in, 1, 3, out);
      break;
    case PHOTOMETRIC_SEPARATED:
      cmyk_to_rgb(in, out);
      break;
    default:
      for (int c = 0; c < 3; ++c) {
        const int alpha = layout.premultiplied ? in[3] : 255;
        out[c] = static_cast<uint8_t>(alpha == 0 ? 0 : std::min(255, in[c] * 255 / alpha));
      }
  }
}

Raster read_through_rgba(TIFF* tiff, const Source& source, const CodecHeader& header, const std::string& where) {
  const size_t num_pixels = static_cast<size_t>(header.width) * static_cast<size_t>(header.height);
  std::vector<uint32_t> packed(num_pixels);
  const int as_stored = tag16(tiff, TIFFTAG_ORIENTATION);
  if (TIFFReadRGBAImageOriented(tiff, static_cast<uint32_t>(header.width), static_cast<uint32_t>(header.height), packed.data(),
                                as_stored, /*stop_on_error=*/1) == 0 ||
      source.cut_short) {
    throw_damaged(source, where);
  }
  Raster raster = make_raster(header, 3);
  for (size_t i = 0; i < num_pixels; ++i) {
    raster.data[i * 3] = static_cast<uint8_t>(TIFFGetR(packed[i]));
    raster.data[i * 3 + 1] = static_cast<uint8_t>(TIFFGetG(packed[i]));
    raster.data[i * 3 + 2] = static_cast<uint8_t>(TIFFGetB(packed[i]));
  }
  return raster;
}

}  // namespace

CodecHeader read_tiff_header(std::string_view encoded, const std::string& where) {
  Source source{encoded, 0, "", false};
  const TiffHandle tiff = open_tiff(source, where);
  CodecHeader header;
  header.width = tag32(tiff.get(), TIFFTAG_IMAGEWIDTH, 0);
  header.height = tag32(tiff.get(), TIFFTAG_IMAGELENGTH, 0);
  const uint16_t orientation = tag16(tiff.get(), TIFFTAG_ORIENTATION);
  header.orientation = orientation >= 1 && orientation <= 8 ? orientation : 1;
  header.animated = TIFFLastDirectory(tiff.get()) == 0;
  return header;
}

Raster decode_tiff(std::string_view encoded, const CodecHeader& header, AlphaChannel alpha, const std::string& where) {
  Source source{encoded, 0, "", false};
  const TiffHandle tiff = open_tiff(source, where);
  const Layout layout = read_layout(tiff.get(), where);
  if (layout.through_rgba) return read_through_rgba(tiff.get(), source, header, where);
  const Palette palette = layout.photometric == PHOTOMETRIC_PALETTE ? read_palette(tiff.get(), layout, where) : Palette();
  const std::vector<uint8_t> samples = read_samples(tiff.get(), source, header, layout, where);
  const size_t stride = static_cast<size_t>(layout.num_samples()), num_colours = static_cast<size_t>(layout.num_colours());
  Raster raster = make_raster(header, layout.has_alpha && alpha == AlphaChannel::kKeep ? 4 : 3);
  const uint8_t* in = samples.data();
  uint8_t* out = raster.data.data();
  for (size_t left = samples.size() / stride; left > 0; --left, in += stride, out += raster.channels) {
    convert_pixel(layout, palette, in, out);
    if (raster.channels == 4) out[3] = in[num_colours];
  }
  return raster;
}

}  // namespace gemtune
