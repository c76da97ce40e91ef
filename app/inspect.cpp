#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "train/checked_data.h"
#include "train/specs.h"

#include <nlohmann/json.hpp>

#include <cstdio>

namespace gemtune {
namespace {

// A row exactly as training sees it.
struct SeenRow {
  Row row;
  Sample sample;
  std::vector<RgbImage> decoded;
  std::vector<std::vector<uint8_t>> planes;
};

SeenRow see_row(const Recipe& recipe, const Preparation& prepared, int64_t index) {
  if (index >= prepared.dataset->size()) {
    throw input_error("--row {}: the data has {} rows, counted from 0", index, prepared.dataset->size());
  }
  SeenRow seen;
  seen.row = prepared.dataset->row(index);
  seen.sample = prepared.chat->sample(seen.row);
  for (const ImageSource& image : seen.row.images) {
    seen.decoded.push_back(
        decode_image(read_image_bytes(image), image_options(recipe), fmt::format("{}: {}", seen.row.where, image.name())));
    seen.planes.push_back(resize_to_planes_CHW(seen.decoded.back(), image_size(prepared.dims)));
  }
  return seen;
}

nlohmann::ordered_json first_and_last_pixel(const std::vector<uint8_t>& planes) {
  const size_t plane = planes.size() / 3;
  const auto pixel = [&](size_t i) {
    return nlohmann::ordered_json::array(
        {normalised(planes[i]), normalised(planes[plane + i]), normalised(planes[2 * plane + i])});
  };
  return nlohmann::ordered_json::array({pixel(0), pixel(plane - 1)});
}

nlohmann::ordered_json to_json(const SeenRow& seen, const Dims& dims) {
  nlohmann::ordered_json json = {{"row", seen.row.index}, {"text", seen.sample.text}, {"token_ids", seen.sample.token_ids}};
  json["target_mask"] = std::vector<int>(seen.sample.target_mask.begin(), seen.sample.target_mask.end());
  json["images"] = nlohmann::ordered_json::array();
  json["pixel_values"] = nlohmann::ordered_json::array();
  for (size_t k = 0; k < seen.planes.size(); ++k) {
    json["images"].push_back({{"path", seen.row.images[k].name()},
                              {"width", seen.decoded[k].width},
                              {"height", seen.decoded[k].height},
                              {"first_token", seen.sample.image_first_token[k]},
                              {"num_tokens", dims.tokens_per_image}});
    json["pixel_values"].push_back(first_and_last_pixel(seen.planes[k]));
  }
  json["length"] = seen.sample.token_ids.size();
  return json;
}

void print_for_people(const SeenRow& seen, const Tokenizer& tokenizer, const Dims& dims) {
  fmt::print("{}\n\n{}\n\n", seen.row.where, seen.sample.text);
  for (size_t k = 0; k < seen.planes.size(); ++k) {
    fmt::print("image {}: {}, {} × {}, tokens {} to {}\n", k, seen.row.images[k].name(), seen.decoded[k].width,
               seen.decoded[k].height, seen.sample.image_first_token[k],
               seen.sample.image_first_token[k] + dims.tokens_per_image - 1);
  }
  fmt::print("{} tokens, {} carry loss; ids with pieces, targets marked *:\n", seen.sample.token_ids.size(),
             seen.sample.num_targets());
  for (size_t t = 0; t < seen.sample.token_ids.size(); ++t) {
    const int32_t id = seen.sample.token_ids[t];
    if (t > 0 && seen.sample.token_ids[t - 1] == id && id == dims.image_token) continue;
    fmt::print("{:>6} {:>7}{} {}\n", t, id, seen.sample.target_mask[t] != 0 ? "*" : " ", in_quotes(tokenizer.piece_of(id)));
  }
}

void write_pictures(const SeenRow& seen, const std::string& folder, int size) {
  make_folders(folder);
  for (size_t k = 0; k < seen.planes.size(); ++k) {
    write_file_atomically(join_path(folder, fmt::format("row-{}-image-{}.png", seen.row.index, k)),
                          encode_png(seen.planes[k], size));
  }
}

}  // namespace

int run_inspect(const InspectCommand& command) {
  const ResolvedRecipe resolved = command.recipe.load();
  const Preparation prepared = prepare(resolved.recipe, Source::kTrain);
  const SeenRow seen = see_row(resolved.recipe, prepared, command.row);
  if (!command.out.empty()) write_pictures(seen, command.out, image_size(prepared.dims));
  if (command.json) {
    fmt::print("{}\n", to_json(seen, prepared.dims).dump(2));
  } else {
    print_for_people(seen, *prepared.tokenizer, prepared.dims);
  }
  return 0;
}

int run_data_preview(const DataCommand& command) {
  const ResolvedRecipe resolved = command.recipe.load();
  const Preparation prepared = prepare(resolved.recipe, Source::kTrain);
  fmt::print("{}\n\n", prepared.dataset->description());
  for (int64_t row = 0; row < std::min(command.num_rows, prepared.dataset->size()); ++row) {
    print_for_people(see_row(resolved.recipe, prepared, row), *prepared.tokenizer, prepared.dims);
    fmt::print("\n");
  }
  return 0;
}

}  // namespace gemtune
