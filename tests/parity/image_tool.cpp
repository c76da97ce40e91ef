// Decodes (and resizes) files for tests/parity/test_images.py:
//   gemtune_image [--size S] [--alpha drop|white|black] [--exif apply|ignore] [--max-pixels N] FILE...
// Each file answers with a line, "ok WIDTH HEIGHT BYTES FORMAT ANIMATED" followed by the raw bytes, or "error TEXT".
// Bytes are interleaved RGB; with --size, planes.
#include "base/error.h"
#include "data/image.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

using namespace gemtune;

namespace {

void answer(const std::string& path, const ImageOptions& options, int size) {
  try {
    ImageSource source;
    source.path = path;
    const std::string encoded = read_image_bytes(source);
    const ImageInfo info = read_image_info(encoded, options, path);
    const RgbImage image = decode_image(encoded, options, path);
    if (image.width != info.width || image.height != info.height) throw input_error("{}: info and pixels disagree", path);
    const std::vector<uint8_t> bytes = size > 0 ? resize_to_planes_CHW(image, size) : image.data;
    std::printf("ok %d %d %zu %s %d\n", image.width, image.height, bytes.size(), info.format.c_str(), info.animated ? 1 : 0);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  } catch (const Error& error) {
    std::printf("error %s\n", error.what());
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  ImageOptions options;
  int size = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const std::string_view value = argument.starts_with("--") && i + 1 < argc ? argv[i + 1] : "";
    if (argument == "--size") {
      size = std::atoi(argv[++i]);
    } else if (argument == "--max-pixels") {
      options.max_pixels = std::atoll(argv[++i]);
    } else if (argument == "--alpha") {
      options.alpha = value == "white" ? AlphaPolicy::kWhite : value == "black" ? AlphaPolicy::kBlack : AlphaPolicy::kDrop;
      ++i;
    } else if (argument == "--exif") {
      options.exif = value == "ignore" ? ExifPolicy::kIgnore : ExifPolicy::kApply;
      ++i;
    } else {
      answer(argv[i], options, size);
    }
  }
  return 0;
}
