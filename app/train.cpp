#include "app/commands.h"
#include "base/error.h"
#include "base/log.h"
#include "dist/group.h"
#include "train/trainer.h"

namespace gemtune {
namespace {

bool is_rank_of_a_launcher() {
  return std::getenv("RANK") != nullptr || std::getenv("WORLD_SIZE") != nullptr;
}

}  // namespace

ResolvedRecipe RecipeWords::load() const {
  RecipeArguments arguments;
  for (const std::string& word : words) {
    if (word.find('=') != std::string::npos) {
      arguments.overrides.push_back(word);
    } else if (arguments.file.empty()) {
      arguments.file = word;
    } else {
      throw input_error("{}: a recipe was already given ({}); settings are written key=value", word, arguments.file);
    }
  }
  arguments.tutorial_flags = tutorial_flags;
  return load_recipe(arguments);
}

int run_train(const TrainCommand& command) {
  TrainOptions options;
  options.resolved = command.recipe.load();
  options.events = command.events;
  options.fresh = command.fresh;
  options.stop_signal = &g_stop_signal;
  Recipe& recipe = options.resolved.recipe;
  if (command.nproc > 0) recipe.dist.nproc = command.nproc;
  if (recipe.dist.nproc > 1 && !is_rank_of_a_launcher()) return run_local_ranks(recipe.dist.nproc, command.argv);

  const RankPlace place = rank_place_from_environment();
  set_log_rank(place.rank, place.world);
  if (place.rank == 0) log_info("{}", describe(options.resolved));
  const auto group = place.world > 1 ? make_socket_group(place, recipe.dist.timeout_s) : make_single_group();
  return int(train(options, *group).code);
}

}  // namespace gemtune
