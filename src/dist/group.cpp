#include "dist/group.h"

#include "base/text.h"

#include <charconv>
#include <cstdlib>
#include <optional>

namespace gemtune {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

int number_in(const char* name, const std::string& text, int low, int high, const std::string& range) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high)
    throw input_error("environment: {} is {}, expected a whole number {}; correct the launcher", name, in_quotes(text), range);
  return value;
}

class SingleGroup : public Group {
 public:
  SingleGroup() : Group(RankPlace{}) {}
  void all_reduce_sum(std::span<float>) override { check(); }
  void all_reduce_sum(std::span<double>) override { check(); }
  void all_reduce_max(std::span<double>) override { check(); }
  void barrier() override { check(); }
  std::string broadcast(const std::string& bytes) override {
    check();
    return bytes;
  }
  Error fail(const std::string& text, ExitCode code) override {
    if (!failure_) failure_ = Error(code, text);
    return *failure_;
  }

 private:
  void check() const {
    if (failure_) throw *failure_;
  }
  std::optional<Error> failure_;
};

}  // namespace

RankPlace rank_place_from_environment() {
  static constexpr const char* kNames[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"};
  std::vector<std::string> set;
  std::vector<std::string> unset;
  for (const char* name : kNames) (variable(name) ? set : unset).emplace_back(name);
  if (set.empty()) return {};
  if (!unset.empty())
    throw input_error("environment: {} set, {} not; a launcher sets all five, a single process needs none: set or unset them",
                      join_some(set), join_some(unset));
  constexpr int kMany = 1 << 20;
  RankPlace place;
  place.world = number_in("WORLD_SIZE", *variable("WORLD_SIZE"), 1, kMany, "from 1");
  const std::string below_world = fmt::format("from 0 to {} (WORLD_SIZE is {})", place.world - 1, place.world);
  place.rank = number_in("RANK", *variable("RANK"), 0, place.world - 1, below_world);
  place.local_rank = number_in("LOCAL_RANK", *variable("LOCAL_RANK"), 0, place.world - 1, below_world);
  place.master_port = number_in("MASTER_PORT", *variable("MASTER_PORT"), 1, 65535, "from 1 to 65535");
  place.master_address = *variable("MASTER_ADDR");
  return place;
}

std::unique_ptr<Group> make_single_group() {
  return std::make_unique<SingleGroup>();
}

}  // namespace gemtune
