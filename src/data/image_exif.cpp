#include "data/image_codec.h"

namespace gemtune {

int exif_orientation(std::string_view exif) {
  constexpr std::string_view kPrefix("Exif\0\0", 6);
  if (exif.starts_with(kPrefix)) exif.remove_prefix(kPrefix.size());
  if (exif.size() < 8) return 1;
  const bool little = exif.starts_with("II");
  if (!little && !exif.starts_with("MM")) return 1;
  const auto u16 = [&](size_t at) { return little ? load_le16(exif, at) : load_be16(exif, at); };
  const auto u32 = [&](size_t at) { return little ? load_le32(exif, at) : load_be32(exif, at); };
  if (u16(2) != 42) return 1;

  const size_t directory = u32(4);
  if (directory > exif.size() - 2) return 1;
  constexpr size_t kEntryBytes = 12;
  constexpr uint32_t kOrientationTag = 0x0112;
  const size_t num_entries = u16(directory);
  for (size_t i = 0; i < num_entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (entry + kEntryBytes > exif.size()) return 1;
    if (u16(entry) != kOrientationTag || u32(entry + 4) != 1) continue;
    uint32_t value = 1;
    switch (u16(entry + 2)) {  // the entry's type: cameras have written every integer type
      case 1:
      case 6:
        value = static_cast<uint8_t>(exif[entry + 8]);
        break;  // 8 bits
      case 3:
      case 8:
        value = u16(entry + 8);
        break;  // 16 bits
      case 4:
      case 9:
        value = u32(entry + 8);
        break;  // 32 bits
      default:
        break;
    }
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

}  // namespace gemtune
