#include "data/loader_plan.h"

#include "base/error.h"
#include "base/file.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <thread>
#include <utility>

namespace gemtune {
namespace {

// MT19937 with the 2002 initialisation, as at::mt19937. Source: Matsumoto and Nishimura, 1998.
class Mt19937 {
 public:
  explicit Mt19937(uint32_t seed) {
    state_[0] = seed;
    for (uint32_t i = 1; i < kLength; ++i) state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }

  uint32_t next() {
    if (at_ == kLength) refill();
    uint32_t y = state_[at_++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

 private:
  static constexpr size_t kLength = 624;

  void refill() {
    for (size_t i = 0; i < kLength; ++i) {
      const uint32_t y = (state_[i] & 0x80000000u) | (state_[(i + 1) % kLength] & 0x7fffffffu);
      state_[i] = state_[(i + 397) % kLength] ^ (y >> 1) ^ ((y & 1u) != 0 ? 0x9908b0dfu : 0u);
    }
    at_ = 0;
  }

  std::array<uint32_t, kLength> state_{};
  size_t at_ = kLength;
};

int64_t rows_per_step(const LoaderOptions& options) {
  return int64_t{options.micro_batch} * options.accumulation * options.world;
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

std::vector<int64_t> random_permutation(int64_t n, uint64_t seed) {
  constexpr int64_t kLimit = (int64_t{1} << 32) / 20;
  if (n >= kLimit) throw input_error("{} rows cannot be shuffled; the limit is {}: split the data set", n, kLimit - 1);
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Mt19937 random(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < n - 1; ++i) {
    const int64_t step = random.next() % (n - i);
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(i + step)]);
  }
  return order;
}

int64_t steps_per_epoch(int64_t num_rows, const LoaderOptions& options) {
  return ceil_div(num_rows, rows_per_step(options));
}

StepPlan plan_step(Cursor begin, int64_t num_rows, const LoaderOptions& options) {
  if (begin.epoch < 0 || begin.position < 0 || begin.position > num_rows) {
    throw input_error(
        "the stored position is epoch {}, row {}, but an epoch has {} rows; the data changed: start a new run with --fresh",
        begin.epoch, begin.position, num_rows);
  }
  if (begin.position == num_rows) begin = {begin.epoch + 1, 0};
  StepPlan plan;
  plan.begin = begin;
  const int64_t last = std::min(num_rows, begin.position + rows_per_step(options));
  plan.end = last == num_rows ? Cursor{begin.epoch + 1, 0} : Cursor{begin.epoch, last};
  plan.num_micro_batches = ceil_div(last - begin.position, options.micro_batch);
  for (int64_t micro = options.rank; micro < plan.num_micro_batches; micro += options.world) {
    const int64_t from = begin.position + micro * options.micro_batch;
    std::vector<int64_t> rows(static_cast<size_t>(std::min<int64_t>(options.micro_batch, last - from)));
    std::iota(rows.begin(), rows.end(), from);
    plan.micro_index.push_back(micro);
    plan.micro_rows.push_back(std::move(rows));
  }
  return plan;
}

namespace {

// Reads image k of the row and gives its bytes to `use(encoded, where)`; what goes wrong becomes the row's fault.
template <class Use>
auto with_image(const Row& row, size_t k, const Use& use) {
  const ImageSource& source = row.images[k];
  const std::string field = fmt::format("images[{}]", k);
  const std::string where = row.where + ": " + field + " " + source.name();
  try {
    return use(read_image_bytes(source), where);
  } catch (const RowError&) {
    throw;
  } catch (const Error& error) {
    // The row and the file are the fault's own fields: the rule keeps the rest.
    std::string rule = error.what();
    for (const std::string& prefix : {where + ": ", source.name() + ": "}) {
      if (rule.starts_with(prefix)) rule.erase(0, prefix.size());
    }
    if (rule.find("data.on_bad_row") == std::string::npos) rule += "; replace the file or set data.on_bad_row=skip";
    throw row_error(row, field, source.name(), rule, reason::kDamagedImage);
  }
}

}  // namespace

RgbImage decode_image_of(const Row& row, size_t k, const ImageOptions& image_options, bool* animated) {
  return with_image(row, k, [&](const std::string& encoded, const std::string& where) {
    if (animated != nullptr) *animated = read_image_info(encoded, image_options, where).animated;
    return decode_image(encoded, image_options, where);
  });
}

std::string picture_key(std::string_view encoded, const ImageOptions& options, int image_size) {
  return sha256_of(fmt::format("{} {} {} {}", sha256_of(encoded), int(options.alpha), int(options.exif), image_size));
}

DecodedRow decode_row(const Dataset& dataset, const Chat& chat, const ImageOptions& image_options, int64_t row,
                      const LoaderOptions& options) {
  const Row source = dataset.row(row);
  DecodedRow decoded;
  decoded.sample = chat.sample(source);
  decoded.sample.row = row;
  if (options.image_size == 0) return decoded;
  for (size_t k = 0; k < source.images.size(); ++k) {
    with_image(source, k, [&](const std::string& encoded, const std::string& where) {
      const std::string& key = decoded.picture_keys.emplace_back(picture_key(encoded, image_options, options.image_size));
      std::vector<uint8_t>& planes_CHW = decoded.images_CHW.emplace_back();
      if (options.is_known && options.is_known(key)) return;
      planes_CHW = resize_to_planes_CHW(decode_image(encoded, image_options, where), options.image_size);
    });
  }
  return decoded;
}

int threads_for(int num_workers) {
  if (num_workers > 0) return num_workers;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace gemtune
