// JPEG through libjpeg-turbo with the reference's settings: accurate integer DCT, smooth chroma upsampling.
#include "data/image_codec.h"

#include <csetjmp>
#include <cstdio>
#include <cstring>

#include <jpeglib.h>

#include <jerror.h>

namespace gemtune {
namespace {

constexpr int kMaxScans = 500;  // a few bytes of empty scans can cost minutes; real progressive files have about ten

// No member function that contains setjmp owns an object with a destructor, and every buffer belongs to the caller:
// a jump out of the library skips nothing.
class JpegReader {
 public:
  explicit JpegReader(std::string_view encoded) {
    std::memset(&cinfo_, 0, sizeof cinfo_);
    cinfo_.err = jpeg_std_error(&errors_);
    cinfo_.client_data = this;
    errors_.error_exit = [](j_common_ptr info) { self(info).fail(); };
    errors_.emit_message = [](j_common_ptr info, int level) {
      if (level < 0 && means_lost_pixels(info->err->msg_code)) self(info).fail();
    };
    errors_.output_message = [](j_common_ptr) {};
    progress_.progress_monitor = [](j_common_ptr info) {
      JpegReader& reader = self(info);
      if (reader.cinfo_.input_scan_number > kMaxScans) reader.fail_with("more than 500 scans");
    };
    source_.next_input_byte = reinterpret_cast<const JOCTET*>(encoded.data());
    source_.bytes_in_buffer = encoded.size();
    source_.init_source = [](j_decompress_ptr) {};
    source_.fill_input_buffer = [](j_decompress_ptr info) -> boolean {
      JpegReader& reader = self(reinterpret_cast<j_common_ptr>(info));
      // The last row of a single scan can ask beyond its data without needing it; a missing scan would go unnoticed.
      if (!reader.pixels_begun_ || jpeg_has_multiple_scans(info)) reader.fail_with("the data end too early");
      static const JOCTET kEnd[2] = {0xFF, JPEG_EOI};
      info->src->next_input_byte = kEnd;
      info->src->bytes_in_buffer = 2;
      return TRUE;
    };
    source_.skip_input_data = [](j_decompress_ptr info, long count) {
      if (count <= 0) return;
      if (static_cast<size_t>(count) > info->src->bytes_in_buffer) {
        self(reinterpret_cast<j_common_ptr>(info)).fail_with("the data end too early");
      }
      info->src->next_input_byte += count;
      info->src->bytes_in_buffer -= static_cast<size_t>(count);
    };
    source_.resync_to_restart = jpeg_resync_to_restart;
    source_.term_source = [](j_decompress_ptr) {};
  }
  ~JpegReader() { jpeg_destroy_decompress(&cinfo_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  bool read_header() {
    if (setjmp(jump_)) return false;
    jpeg_create_decompress(&cinfo_);
    cinfo_.src = &source_;
    cinfo_.progress = &progress_;
    jpeg_read_header(&cinfo_, TRUE);
    return true;
  }

  bool start() {
    if (setjmp(jump_)) return false;
    cinfo_.out_color_space = is_cmyk() ? JCS_CMYK : JCS_RGB;
    cinfo_.dct_method = JDCT_ISLOW;
    cinfo_.do_fancy_upsampling = TRUE;
    pixels_begun_ = true;
    jpeg_start_decompress(&cinfo_);
    return true;
  }

  // Into rows of 3 channels; `cmyk_row` (4 × width bytes) is used by four-colour files only.
  bool read_rows(uint8_t* rgb, uint8_t* cmyk_row) {
    if (setjmp(jump_)) return false;
    const size_t row_bytes = size_t{3} * cinfo_.output_width;
    while (cinfo_.output_scanline < cinfo_.output_height) {
      uint8_t* const row = rgb + cinfo_.output_scanline * row_bytes;
      JSAMPROW target = is_cmyk() ? cmyk_row : row;
      jpeg_read_scanlines(&cinfo_, &target, 1);
      if (is_cmyk()) invert_to_rgb(cmyk_row, row);
    }
    return true;
  }

  int64_t width() const { return cinfo_.image_width; }
  int64_t height() const { return cinfo_.image_height; }
  int num_components() const { return cinfo_.num_components; }
  bool is_cmyk() const { return cinfo_.num_components == 4; }
  const char* message() const { return message_; }

 private:
  static JpegReader& self(j_common_ptr info) { return *static_cast<JpegReader*>(info->client_data); }

  // Other warnings (stray bytes between segments, odd header versions) leave every pixel as it was meant.
  static bool means_lost_pixels(int code) {
    return code == JWRN_HIT_MARKER || code == JWRN_JPEG_EOF || code == JWRN_HUFF_BAD_CODE || code == JWRN_MUST_RESYNC ||
           code == JWRN_ARITH_BAD_CODE;
  }

  [[noreturn]] void fail() {
    errors_.format_message(reinterpret_cast<j_common_ptr>(&cinfo_), message_);
    std::longjmp(jump_, 1);
  }
  [[noreturn]] void fail_with(const char* text) {
    std::snprintf(message_, sizeof message_, "%s", text);
    std::longjmp(jump_, 1);
  }

  // Four-colour files hold inverted inks (Adobe's convention, which the reference assumes for all of them).
  void invert_to_rgb(const uint8_t* row, uint8_t* rgb) const {
    for (JDIMENSION x = 0; x < cinfo_.output_width; ++x, row += 4, rgb += 3) {
      const uint8_t inks[4] = {static_cast<uint8_t>(255 - row[0]), static_cast<uint8_t>(255 - row[1]),
                               static_cast<uint8_t>(255 - row[2]), static_cast<uint8_t>(255 - row[3])};
      cmyk_to_rgb(inks, rgb);
    }
  }

  jpeg_decompress_struct cinfo_;
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  jpeg_source_mgr source_{};
  std::jmp_buf jump_{};
  bool pixels_begun_ = false;
  char message_[JMSG_LENGTH_MAX] = "";
};

}  // namespace

CodecHeader read_jpeg_header(std::string_view s, const std::string& where) {
  CodecHeader header;
  bool has_frame = false, has_exif = false;
  size_t at = 2;
  while (true) {
    at = s.find('\xff', at);
    if (at != std::string_view::npos) at = s.find_first_not_of('\xff', at);
    if (at == std::string_view::npos) break;
    const int marker = static_cast<uint8_t>(s[at++]);
    if (marker == 0x00 || marker == 0x01 || (marker >= 0xD0 && marker <= 0xD8)) continue;
    if (marker == 0xD9 || marker == 0xDA) break;  // end of image, start of scan
    if (at + 2 > s.size()) break;
    const size_t length = load_be16(s, at);
    if (length < 2 || at + length > s.size()) break;
    const std::string_view body = s.substr(at + 2, length - 2);
    const bool is_frame = marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
    if (is_frame && body.size() >= 6 && !has_frame) {
      has_frame = true;
      header.height = load_be16(body, 1);
      header.width = load_be16(body, 3);
    } else if (marker == 0xE1 && !has_exif && body.starts_with(std::string_view("Exif\0\0", 6))) {
      has_exif = true;
      header.orientation = exif_orientation(body);
    }
    at += length;
  }
  if (!has_frame) throw damaged_image(where, "jpeg", "it has no frame header");
  return header;
}

Raster decode_jpeg(std::string_view encoded, const CodecHeader& header, AlphaChannel, const std::string& where) {
  JpegReader reader(encoded);
  if (!reader.read_header()) throw damaged_image(where, "jpeg", reader.message());
  if (reader.width() != header.width || reader.height() != header.height) {
    throw damaged_image(where, "jpeg", "it has two frame headers");
  }
  const int n = reader.num_components();
  if (n != 1 && n != 3 && n != 4) throw unsupported_image(where, fmt::format("JPEG with {} components", n));
  if (!reader.start()) throw damaged_image(where, "jpeg", reader.message());
  Raster raster = make_raster(header, 3);
  std::vector<uint8_t> cmyk_row(reader.is_cmyk() ? static_cast<size_t>(raster.width) * 4 : 0);
  if (!reader.read_rows(raster.data.data(), cmyk_row.data())) throw damaged_image(where, "jpeg", reader.message());
  return raster;
}

}  // namespace gemtune
