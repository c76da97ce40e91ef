#include "data/image.h"
#include "base/error.h"
#include "base/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace gemtune {
namespace {

using Pixel = std::array<int, 3>;

std::string from_base64(std::string_view text) {
  const std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t value = alphabet.find(c);
    if (value == std::string_view::npos) break;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (++count % 4 != 1) out.push_back(static_cast<char>(bits >> (6 - 2 * ((count - 1) % 4))));
  }
  return out;
}

const std::string kPaletteTrns = from_base64(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAMAAAAoyzS7AAAAA1BMVEXIZDLxgAUBAAAAAXRSTlMAQObYZgAAAApJREFUeNpjYAAAAAIAAeUn3vwAAAAASUVORK5C"
    "YII=");
const std::string kGrey16_8000 =
    from_base64("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAAAAABq7kcWAAAAC0lEQVR42mNoYAAAAQMAga3osnQAAAAASUVORK5CYII=");
const std::string kGrey16_0100 =
    from_base64("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAAAAABq7kcWAAAAC0lEQVR42mNgZAAAAAUAAkLCRJ8AAAAASUVORK5CYII=");
const std::string kBomb =
    from_base64("iVBORw0KGgoAAAANSUhEUgAA/9wAAP/cCAIAAAAcNYFMAAAADElEQVR42mNgoAwAAABAAAGJya9DAAAAAElFTkSuQmCC");
const std::string kBilevel =
    from_base64("iVBORw0KGgoAAAANSUhEUgAAAAIAAAABAQAAAADcWUInAAAACklEQVR42mNwAAAAQgBBhL+OYgAAAABJRU5ErkJggg==");
const std::string kGif2 = from_base64("R0lGODlhAQABAIAAAP8AAAAA/yH5BAAKAAAALAAAAAABAAEAAAICRAEAIfkEAAoAAAAsAAAAAAEAAQAAAgJMAQA7");

std::string fixture(const std::string& name) {
  return read_file(GEMTUNE_SOURCE_DIR "/tests/data/images/" + name);
}

RgbImage decode(std::string_view encoded, const ImageOptions& options = {}) {
  return decode_image(encoded, options, "a.jsonl:7: x");
}

Pixel at(const RgbImage& image, int x, int y) {
  const size_t i = (static_cast<size_t>(y) * static_cast<size_t>(image.width) + static_cast<size_t>(x)) * 3;
  return {image.data.at(i), image.data.at(i + 1), image.data.at(i + 2)};
}

int distance(const Pixel& a, const Pixel& b) {
  return std::max({std::abs(a[0] - b[0]), std::abs(a[1] - b[1]), std::abs(a[2] - b[2])});
}

RgbImage constant(int width, int height, Pixel colour) {
  RgbImage image{width, height, {}};
  for (int i = 0; i < width * height; ++i) {
    for (const int value : colour) image.data.push_back(static_cast<uint8_t>(value));
  }
  return image;
}

std::string error_of(std::string_view encoded, const ImageOptions& options = {}) {
  try {
    decode(encoded, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kInput);
    return error.what();
  }
  return "no error";
}

void append_le(std::string& out, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

// A BMP header of 54 bytes; palette and pixels follow.
std::string bmp_header(int32_t width, int32_t height, int bits, uint32_t compression, uint32_t pixels_at) {
  std::string out = "BM";
  append_le(out, 0, 8);
  append_le(out, pixels_at, 4);
  append_le(out, 40, 4);
  append_le(out, static_cast<uint32_t>(width), 4);
  append_le(out, static_cast<uint32_t>(height), 4);
  append_le(out, 1, 2);
  append_le(out, static_cast<uint32_t>(bits), 2);
  append_le(out, compression, 4);
  out.resize(54, '\0');
  return out;
}

struct Tag {
  uint16_t id;
  uint32_t value;
};

// A 1 × 1 TIFF of one strip in either byte order; every tag a 16-bit value, in ascending order.
std::string tiny_tiff(bool big_endian, std::vector<Tag> tags, const std::string& strip) {
  std::string out = big_endian ? "MM" : "II";
  const auto append = [&](uint32_t value, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) out.push_back(static_cast<char>(value >> 8 * (big_endian ? num_bytes - 1 - i : i)));
  };
  append(42, 2);
  append(8, 4);
  append(static_cast<uint32_t>(tags.size()), 2);
  constexpr uint16_t kStripOffsets = 273;
  const uint32_t strip_at = static_cast<uint32_t>(8 + 2 + tags.size() * 12 + 4);
  for (const Tag& tag : tags) {
    append(tag.id, 2);
    append(3, 2);
    append(1, 4);
    append(tag.id == kStripOffsets ? strip_at : tag.value, 2);
    append(0, 2);
  }
  append(0, 4);
  return out + strip;
}

// `encoded` with its EXIF orientation, 7 in the fixtures, replaced.
std::string with_orientation(std::string encoded, int orientation) {
  const size_t big = encoded.find(std::string("\x01\x12\0\x03\0\0\0\x01\0\x07", 10));
  const size_t little = encoded.find(std::string("\x12\x01\x03\0\x01\0\0\0\x07\0", 10));
  if (big != std::string::npos) encoded[big + 9] = static_cast<char>(orientation);
  if (little != std::string::npos) encoded[little + 8] = static_cast<char>(orientation);
  EXPECT_NE(big == std::string::npos, little == std::string::npos);
  return encoded;
}

TEST(Image, SixteenBitGreyIsScaledNotClipped) {
  EXPECT_EQ(at(decode(kGrey16_8000), 0, 0), (Pixel{128, 128, 128}));
  EXPECT_EQ(at(decode(kGrey16_0100), 0, 0), (Pixel{1, 1, 1}));
  EXPECT_NEAR(normalised(decode(kGrey16_8000).data[0]), 0.003922F, 1e-6F);
  EXPECT_NEAR(normalised(decode(kGrey16_0100).data[0]), -0.992157F, 1e-6F);
  const std::vector<Tag> tags = {{256, 1}, {257, 1}, {258, 16}, {259, 1}, {262, 1}, {273, 0}, {277, 1}, {278, 1}, {279, 2}};
  EXPECT_EQ(at(decode(tiny_tiff(true, tags, std::string("\x80\x00", 2))), 0, 0), (Pixel{128, 128, 128}));
  EXPECT_EQ(at(decode(tiny_tiff(false, tags, std::string("\x00\x80", 2))), 0, 0), (Pixel{128, 128, 128}));
}

TEST(Image, TransparencyIsDroppedOrComposited) {
  ImageOptions drop, white, black;
  white.alpha = AlphaPolicy::kWhite;
  black.alpha = AlphaPolicy::kBlack;
  EXPECT_EQ(at(decode(kPaletteTrns, drop), 0, 0), (Pixel{200, 100, 50}));
  EXPECT_EQ(at(decode(kPaletteTrns, white), 0, 0), (Pixel{255, 255, 255}));
  EXPECT_EQ(at(decode(kPaletteTrns, black), 0, 0), (Pixel{0, 0, 0}));
  for (const std::string name : {"half_transparent.png", "half_transparent.webp"}) {
    EXPECT_EQ(at(decode(fixture(name), drop), 3, 3), (Pixel{200, 100, 50})) << name;
    EXPECT_EQ(at(decode(fixture(name), white), 3, 3), (Pixel{227, 177, 152})) << name;
    EXPECT_EQ(at(decode(fixture(name), black), 3, 3), (Pixel{100, 50, 25})) << name;
  }
  EXPECT_NEAR(normalised(200), 0.568627F, 1e-6F);
  EXPECT_NEAR(normalised(100), -0.215686F, 1e-6F);
  EXPECT_NEAR(normalised(50), -0.607843F, 1e-6F);
}

TEST(Image, BilevelIsBlackAndWhite) {
  const RgbImage image = decode(kBilevel);
  EXPECT_EQ(normalised(static_cast<uint8_t>(at(image, 0, 0)[0])), -1.0F);
  EXPECT_EQ(normalised(static_cast<uint8_t>(at(image, 1, 0)[2])), 1.0F);
}

TEST(Image, GreyBecomesThreeEqualChannels) {
  const std::vector<Tag> tags = {{256, 1}, {257, 1}, {258, 8}, {259, 1}, {262, 1}, {273, 0}, {277, 1}, {278, 1}, {279, 1}};
  EXPECT_EQ(at(decode(tiny_tiff(false, tags, "\x4d")), 0, 0), (Pixel{77, 77, 77}));
  EXPECT_NEAR(normalised(77), -0.396078F, 1e-6F);
}

TEST(Image, InvertedCmykRedStaysRed) {
  EXPECT_LE(distance(at(decode(fixture("cmyk_red.jpg")), 8, 8), {255, 0, 0}), 6);
}

TEST(Image, ADecompressionBombIsRefusedFromItsHeader) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(
      error_of(kBomb),
      "a.jsonl:7: x: the image has 65500 x 65500 pixels, the limit is 178956970 in all; shrink it or raise image.max_pixels");
  EXPECT_THROW(read_image_info(kBomb, {}, "x"), Error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(100));
}

TEST(Image, ThePixelLimitIsASetting) {
  const std::string strip = encode_png(constant(1, 4000, {9, 9, 9}));
  ImageOptions options;
  options.max_pixels = 4000;
  EXPECT_EQ(decode(strip, options).height, 4000);
  options.max_pixels = 3999;
  EXPECT_EQ(error_of(strip, options),
            "a.jsonl:7: x: the image has 1 x 4000 pixels, the limit is 3999 in all; shrink it or raise image.max_pixels");
}

TEST(Image, AnimationsGiveTheirFirstFrame) {
  for (const std::string& encoded : {kGif2, fixture("animated.webp"), fixture("animated.png")}) {
    EXPECT_EQ(at(decode(encoded), 0, 0), (Pixel{255, 0, 0}));
    EXPECT_TRUE(read_image_info(encoded, {}, "x").animated);
  }
  for (const std::string name : {"photo.gif", "lossy.webp", "photo.png", "lzw.tif", "baseline.jpg"}) {
    EXPECT_FALSE(read_image_info(fixture(name), {}, "x").animated) << name;
  }
}

// Corners of the 32 × 16 picture, from the top left one clockwise, after each orientation.
TEST(Image, EveryOrientationIsApplied) {
  const Pixel r{255, 0, 0}, g{0, 255, 0}, b{0, 0, 255}, w{255, 255, 255};
  const std::array<std::array<Pixel, 4>, 8> expected = {
      {{r, g, w, b}, {g, r, b, w}, {w, b, r, g}, {b, w, g, r}, {r, b, w, g}, {b, r, g, w}, {w, g, r, b}, {g, w, b, r}}};
  for (const std::string name : {"turned.jpg", "turned.png", "turned.webp", "turned.tif"}) {
    for (int orientation = 1; orientation <= 8; ++orientation) {
      const std::string encoded = with_orientation(fixture(name), orientation);
      const RgbImage image = decode(encoded);
      const int width = orientation >= 5 ? 16 : 32, height = orientation >= 5 ? 32 : 16;
      ASSERT_EQ(image.width, width) << name << orientation;
      ASSERT_EQ(image.height, height) << name << orientation;
      const ImageInfo info = read_image_info(encoded, {}, "x");
      EXPECT_EQ(info.width, width);
      EXPECT_EQ(info.height, height);
      const std::array<Pixel, 4> corners = {at(image, 0, 0), at(image, width - 1, 0), at(image, width - 1, height - 1),
                                            at(image, 0, height - 1)};
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_LE(distance(corners[i], expected[static_cast<size_t>(orientation) - 1][i]), 3)
            << name << orientation << " corner " << i;
      }
    }
  }
}

TEST(Image, ExifIsIgnoredOnRequestButATiffTagIsNot) {
  ImageOptions ignore;
  ignore.exif = ExifPolicy::kIgnore;
  for (const std::string name : {"turned.jpg", "turned.png", "turned.webp"})
    EXPECT_EQ(decode(fixture(name), ignore).width, 32) << name;
  EXPECT_EQ(decode(fixture("turned.tif"), ignore).width, 16);
}

TEST(Image, AnInvalidOrientationLeavesThePictureAlone) {
  for (const int orientation : {0, 9, 200}) EXPECT_EQ(decode(with_orientation(fixture("turned.jpg"), orientation)).width, 32);
}

TEST(Image, ATruncatedFileIsAnErrorWhereverItEnds) {
  for (const std::string name :
       {"baseline.jpg", "progressive.jpg", "photo.png", "photo.gif", "lossy.webp", "lzw.tif", "photo.bmp"}) {
    const std::string whole = fixture(name);
    EXPECT_EQ(error_of(whole), "no error") << name;
    for (size_t tenths = 0; tenths < 10; ++tenths) {
      EXPECT_NE(error_of(std::string_view(whole).substr(0, whole.size() * tenths / 10)), "no error") << name << " " << tenths;
    }
  }
}

TEST(Image, ErrorsNameTheFormatTheFaultAndTheRemedy) {
  const auto cut = [](const std::string& name, size_t tenths = 6) {
    const std::string whole = fixture(name);
    return error_of(whole.substr(0, whole.size() * tenths / 10));
  };
  const std::string remedy = "; replace the file or set data.on_bad_row=skip";
  EXPECT_EQ(cut("baseline.jpg", 9),
            "a.jsonl:7: x: the jpeg file is damaged or cut short: Corrupt JPEG data: premature end of data segment" + remedy);
  EXPECT_EQ(cut("progressive.jpg"), "a.jsonl:7: x: the jpeg file is damaged or cut short: the data end too early" + remedy);
  EXPECT_EQ(cut("photo.png"), "a.jsonl:7: x: the png file is damaged or cut short: the data end too early" + remedy);
  EXPECT_EQ(cut("photo.gif"),
            "a.jsonl:7: x: the gif file is damaged or cut short: its first frame's pixels are incomplete" + remedy);
  EXPECT_EQ(cut("lossy.webp"), "a.jsonl:7: x: the webp file is damaged or cut short: its pixels cannot be decoded" + remedy);
  EXPECT_EQ(cut("photo.bmp"),
            "a.jsonl:7: x: the bmp file is damaged or cut short: expected 3072 bytes of pixels, got 1821" + remedy);
}

TEST(Image, AJpegWithoutItsEndMarkerIsWhole) {
  const std::string whole = fixture("baseline.jpg");
  EXPECT_EQ(decode(whole.substr(0, whole.size() - 2)).data, decode(whole).data);
}

TEST(Image, APngWithAFlippedBitIsDamaged) {
  std::string damaged = fixture("photo.png");
  damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 4);
  EXPECT_NE(error_of(damaged), "no error");
}

TEST(Image, OtherFilesAreRefusedByName) {
  EXPECT_EQ(error_of(""), "a.jsonl:7: x: the image file is empty (0 bytes); replace the file or set data.on_bad_row=skip");
  EXPECT_EQ(error_of("<html><body>Not found</body></html>"),
            "a.jsonl:7: x: not an image (the file starts with \"<html><body>Not \"); expected JPEG, PNG, WebP, GIF, TIFF or BMP; "
            "replace the file");
  const std::string_view avif(
      "\0\0\0\x20"
      "ftypavif\0\0\0\0",
      16),
      heic(
          "\0\0\0\x18"
          "ftypheic\0\0\0\0",
          16);
  EXPECT_EQ(error_of(avif), "a.jsonl:7: x: AVIF format is not read; convert the file to PNG or JPEG");
  EXPECT_EQ(error_of(heic), "a.jsonl:7: x: HEIC format is not read; convert the file to PNG or JPEG");
  const std::vector<Tag> jbig = {{256, 1}, {257, 1}, {258, 1}, {259, 34661}, {262, 1}, {273, 0}, {277, 1}, {278, 1}, {279, 1}};
  EXPECT_EQ(error_of(tiny_tiff(false, jbig, "x")),
            "a.jsonl:7: x: TIFF with JBIG compression is not read; convert the file to PNG or JPEG");
  const std::vector<Tag> real = {{256, 1}, {257, 1}, {258, 32}, {259, 1}, {262, 1},
                                 {273, 0}, {277, 1}, {278, 1},  {279, 4}, {339, 3}};
  EXPECT_EQ(error_of(tiny_tiff(false, real, "abcd")),
            "a.jsonl:7: x: TIFF with floating-point samples of 32 bits is not read; convert the file to PNG or JPEG");
  EXPECT_EQ(error_of(bmp_header(8, 8, 8, 1, 54) + std::string(64, 'x')),
            "a.jsonl:7: x: BMP of 8 bits a pixel with compression 1 is not read; convert the file to PNG or JPEG");
  EXPECT_EQ(error_of(bmp_header(8, 8, 16, 0, 54) + std::string(128, 'x')),
            "a.jsonl:7: x: BMP of 16 bits a pixel is not read; convert the file to PNG or JPEG");
}

TEST(Image, AZeroSizeIsDamage) {
  EXPECT_EQ(
      error_of(bmp_header(0, 8, 24, 0, 54)),
      "a.jsonl:7: x: the bmp file is damaged or cut short: its size is 0 x 8; replace the file or set data.on_bad_row=skip");
}

TEST(Image, BmpRowsRunUpwardsUnlessTheHeightIsNegative) {
  const std::string low = std::string("\x10\x20\x30\0", 4), high = std::string("\x40\x50\x60\0", 4);
  const RgbImage up = decode(bmp_header(1, 2, 24, 0, 54) + low + high);
  EXPECT_EQ(at(up, 0, 1), (Pixel{0x30, 0x20, 0x10}));
  EXPECT_EQ(at(up, 0, 0), (Pixel{0x60, 0x50, 0x40}));
  const RgbImage down = decode(bmp_header(1, -2, 32, 0, 54) + low + high);
  EXPECT_EQ(at(down, 0, 0), (Pixel{0x30, 0x20, 0x10}));
  const std::string palette = std::string("\0\0\xff\0\xff\0\0\0", 8);
  const RgbImage bits = decode(bmp_header(3, 1, 1, 0, 62) + palette + std::string("\x40\0\0\0", 4));
  EXPECT_EQ(at(bits, 0, 0), (Pixel{255, 0, 0}));
  EXPECT_EQ(at(bits, 1, 0), (Pixel{0, 0, 255}));
}

TEST(Image, AConstantStaysConstantUnderAnyResize) {
  for (const auto& [width, height] : std::vector<std::pair<int, int>>{{1, 1}, {1, 4000}, {4000, 1}, {895, 897}, {2048, 3}}) {
    const std::vector<uint8_t> planes = resize_to_planes_CHW(constant(width, height, {200, 100, 50}), 896);
    ASSERT_EQ(planes.size(), 896U * 896 * 3);
    const size_t plane = 896 * 896;
    for (size_t i = 0; i < plane; ++i) {
      ASSERT_TRUE(planes[i] == 200 && planes[plane + i] == 100 && planes[2 * plane + i] == 50)
          << width << " x " << height << " at " << i;
    }
  }
}

TEST(Image, AnImageOfTheTowersSizeIsNotResampled) {
  RgbImage image = constant(4, 4, {0, 0, 0});
  for (size_t i = 0; i < image.data.size(); ++i) image.data[i] = static_cast<uint8_t>(i * 83);
  const std::vector<uint8_t> planes = resize_to_planes_CHW(image, 4);
  for (size_t i = 0; i < 16; ++i) {
    for (size_t c = 0; c < 3; ++c) EXPECT_EQ(planes[c * 16 + i], image.data[i * 3 + c]);
  }
}

// 1024 → 896: output 0 takes 5/6 and 1/6 of sources 0 and 1; output 1 takes 13/18 and 5/18 of sources 1 and 2.
TEST(Image, ShrinkingUsesTheAntialiasedTriangle) {
  RgbImage row = constant(1024, 1, {0, 0, 0});
  const std::array<int, 3> sources = {60, 120, 12};
  for (size_t x = 0; x < 3; ++x) row.data[x * 3] = static_cast<uint8_t>(sources[x]);
  const std::vector<uint8_t> planes = resize_to_planes_CHW(row, 896);
  EXPECT_EQ(planes[0], 70);
  EXPECT_EQ(planes[1], 90);
}

TEST(Image, NormalisationIsExact) {
  EXPECT_EQ(normalised(0), -1.0F);
  EXPECT_EQ(normalised(255), 1.0F);
  for (int v = 0; v < 256; ++v) EXPECT_EQ(normalised(static_cast<uint8_t>(v)), (static_cast<float>(v) - 127.5F) / 127.5F);
}

TEST(Image, WrittenPngFilesReadBack) {
  RgbImage image = constant(5, 5, {1, 2, 3});
  image.data[7] = 99;
  const RgbImage back = decode(encode_png(image));
  EXPECT_EQ(back.width, 5);
  EXPECT_EQ(back.data, image.data);
  EXPECT_EQ(decode(encode_png(resize_to_planes_CHW(image, 5), 5)).data, image.data);
}

TEST(Image, LoaderThreadsGetTheSamePixels) {
  const std::string encoded = fixture("progressive.jpg");
  const std::vector<uint8_t> expected = resize_to_planes_CHW(decode(encoded), 96);
  std::vector<int> num_equal(4, 0);
  std::vector<std::thread> threads;
  for (int& count : num_equal) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        if (resize_to_planes_CHW(decode(encoded), 96) == expected) ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_equal, std::vector<int>(4, 20));
}

TEST(Image, FilesAreClosedAfterReading) {
  ImageSource source;
  source.path = GEMTUNE_SOURCE_DIR "/tests/data/images/animated.webp";
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(decode(read_image_bytes(source)).width, 4);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(Image, EmbeddedBytesNeedNoFile) {
  ImageSource source;
  source.bytes = kGif2;
  EXPECT_EQ(read_image_bytes(source), kGif2);
}

TEST(Image, TheInfoNamesTheFormat) {
  const std::vector<std::pair<std::string, std::string>> cases = {{"baseline.jpg", "jpeg"}, {"photo.png", "png"},
                                                                  {"lossy.webp", "webp"},   {"photo.gif", "gif"},
                                                                  {"lzw.tif", "tiff"},      {"photo.bmp", "bmp"}};
  for (const auto& [name, format] : cases) {
    const ImageInfo info = read_image_info(fixture(name), {}, "x");
    EXPECT_EQ(info.format, format);
    EXPECT_EQ(info.width, 32);
    EXPECT_EQ(info.height, 32);
  }
}

}  // namespace
}  // namespace gemtune
