#include "train/specs.h"

#include "base/error.h"
#include "base/file.h"
#include "base/hub.h"
#include "base/log.h"
#include "base/text.h"
#include "ops/cuda.h"

#include <algorithm>
#include <thread>

namespace gemtune {

namespace {

// A folder or file as it is; a hub id becomes its snapshot in the hub's cache.
std::string resolve(HubKind kind, const std::string& name) {
  const bool here = folder_exists(name) || file_exists(name);
  return !here && looks_like_hub_id(name) ? find_hub_snapshot(kind, name) : name;
}

}  // namespace

std::string model_folder(const Recipe& recipe) {
  if (recipe.model.path.empty()) throw input_error("model.path is not set; give a model folder: model.path=DIR");
  return resolve(HubKind::kModel, recipe.model.path);
}

at::Device device_for(const Recipe& recipe, int local_rank) {
  if (recipe.train.device == "cpu") return at::kCPU;
  const std::string& fault = why_no_cuda();
  if (fault.empty()) return {at::kCUDA, static_cast<at::DeviceIndex>(local_rank % num_cuda_devices())};
  if (recipe.train.device == "cuda") throw environment_error("train.device=cuda: {}", fault);
  return at::kCPU;
}

ModelSpec model_spec(const Recipe& recipe, at::Device device) {
  ModelSpec spec;
  spec.device = device;
  spec.compute_dtype = device.is_cuda() ? at::kBFloat16 : at::kFloat;
  const LoraRecipe& lora = recipe.lora;
  spec.train_all = lora.rank == 0;
  spec.lora.rank = lora.rank;
  spec.lora.vision_rank = lora.vision_rank;
  spec.lora.alpha = lora.alpha;
  spec.lora.dropout_p = lora.dropout;
  spec.lora.rslora = lora.rslora;
  spec.lora.language = lora.targets != "vision";
  spec.lora.vision = lora.targets != "language";
  spec.quant = {recipe.quant.base == "nf4", recipe.quant.double_quant, recipe.quant.vision};
  spec.tables = lora.train_tables == "tied" ? Tables::kTied : lora.train_tables == "untied" ? Tables::kUntied : Tables::kFrozen;
  spec.table_dtype = recipe.optim.table_dtype == "fp32" ? at::kFloat : at::kBFloat16;
  spec.seed = uint64_t(recipe.train.seed);
  return spec;
}

ModelSpec model_spec_for(const Recipe& recipe, at::Device device, const std::string& adapter_folder) {
  ModelSpec spec = model_spec(recipe, device);
  spec.train_all = false;
  spec.lora.language = spec.lora.vision = false;
  spec.tables = Tables::kFrozen;
  if (!adapter_folder.empty()) {
    const AdapterConfig config = read_adapter_config(adapter_folder);
    spec.lora = config.lora;
    spec.tables = config.tables;
  }
  return spec;
}

RecomputePolicy recompute_policy(const Recipe& recipe) {
  if (recipe.train.recompute == "true") return RecomputePolicy::kAlways;
  return recipe.train.recompute == "false" ? RecomputePolicy::kNever : RecomputePolicy::kAuto;
}

std::vector<std::string> remedies(const Recipe& recipe, const PlanLoad& load) {
  std::vector<std::string> texts;
  if (load.micro_batch > 1) {
    texts.push_back(fmt::format("train.micro_batch={} with train.accumulation={}", load.micro_batch / 2, load.accumulation * 2));
  }
  if (recipe.train.recompute == "false") texts.push_back("train.recompute=auto");
  if (recipe.quant.base == "none" && recipe.lora.rank > 0) texts.push_back("quant.base=nf4");
  if (recipe.lora.train_tables != "none") texts.push_back("lora.train_tables=none");
  if (recipe.lora.rank == 0) texts.push_back("lora.rank=16");
  if (recipe.quant.base == "nf4" && !recipe.quant.vision && load.images_a_row > 0) texts.push_back("quant.vision=true");
  texts.push_back(fmt::format("data.max_length={} with data.on_too_long=skip", load.longest / 2));
  texts.push_back("a GPU with more memory");
  return texts;
}

RowSizes row_sizes(const DataReport& report) {
  RowSizes sizes;
  for (const int32_t length : report.lengths) sizes.longest = std::max<int64_t>(sizes.longest, length);
  sizes.most_targets = report.most_targets;
  sizes.most_images = report.most_images;
  return sizes;
}

PlanLoad plan_load(const Recipe& recipe, const Dims& dims, const RowSizes& sizes, int world) {
  PlanLoad load;
  load.micro_batch = recipe.train.micro_batch;
  load.accumulation = accumulation_for(recipe, world);
  load.longest = sizes.longest;
  load.targets = sizes.most_targets;
  load.images_a_row = dims.vision ? sizes.most_images : 0;
  return load;
}

MemoryChoice memory_choice(const Recipe& recipe, const Dims& dims, const ModelSpec& spec, const PlanLoad& load) {
  // cuBLAS and cuDNN have working memory of their own, and blocks of the allocator lie apart.
  constexpr double kUsable = 0.95;
  constexpr int64_t kLibraries = int64_t{1} << 30;
  int64_t free = 0, total = 0;
  kernels().memory(spec.device.index(), &free, &total);
  const bool limited = recipe.train.memory_gib > 0;
  const int64_t budget =
      limited ? int64_t(recipe.train.memory_gib * double(1 << 30)) : int64_t(kUsable * double(free - kLibraries));
  const MemoryChoice choice = choose_memory(dims, spec, load, recompute_policy(recipe), budget);
  const Plan plan = make_plan(dims, spec, load, choice);
  if (plan.peak_bytes > budget) {
    throw environment_error("a micro-batch of {} × {} tokens with {} pictures needs about {}, {} is {}: {}", load.micro_batch,
                            load.longest, load.micro_batch * load.images_a_row, human_bytes(plan.peak_bytes),
                            limited ? "train.memory_gib" : "usable on this GPU", human_bytes(budget),
                            join_some(remedies(recipe, load)));
  }
  log_info("{}: about {} at the peak, {} usable", choice.describe(), human_bytes(plan.peak_bytes), human_bytes(budget));
  return choice;
}

RowMapping row_mapping(const Recipe& recipe) {
  const DataRecipe& data = recipe.data;
  RowMapping mapping;
  mapping.image_column = data.image_column;
  mapping.system = data.system;
  mapping.prompt = data.prompt;
  mapping.answer = data.answer;
  mapping.image_first = data.image_place == "before";
  return mapping;
}

ImageOptions image_options(const Recipe& recipe) {
  ImageOptions options;
  options.alpha = recipe.image.alpha == "white"   ? AlphaPolicy::kWhite
                  : recipe.image.alpha == "black" ? AlphaPolicy::kBlack
                                                  : AlphaPolicy::kDrop;
  options.exif = recipe.image.exif == "ignore" ? ExifPolicy::kIgnore : ExifPolicy::kApply;
  options.max_pixels = recipe.image.max_pixels;
  return options;
}

ChatOptions chat_options(const Recipe& recipe, const Dims& dims) {
  const DataRecipe& data = recipe.data;
  ChatOptions options;
  options.loss_on = data.loss_on == "all" ? LossOn::kAll : data.loss_on == "last_answer" ? LossOn::kLastAnswer : LossOn::kAnswer;
  options.special_tokens = data.special_tokens == "parse"    ? SpecialTokens::kParse
                           : data.special_tokens == "reject" ? SpecialTokens::kReject
                                                             : SpecialTokens::kText;
  options.max_length = data.max_length > 0 ? std::min(data.max_length, dims.text.max_positions) : dims.text.max_positions;
  options.on_too_long = data.on_too_long == "skip"      ? TooLong::kSkip
                        : data.on_too_long == "shorten" ? TooLong::kShorten
                                                        : TooLong::kError;
  return options;
}

ChatTokens chat_tokens(const Tokenizer& tokenizer, const Dims& dims, const std::string& where) {
  ChatTokens tokens;
  const auto need = [&](const char* piece) {
    const int32_t id = tokenizer.id_of(piece);
    if (id < 0) throw input_error("{}: has no token {}; this is no Gemma 3 tokenizer", where, piece);
    return id;
  };
  tokens.bos = need("<bos>");
  tokens.pad = need("<pad>");
  tokens.start_of_turn = need("<start_of_turn>");
  tokens.end_of_turn = need("<end_of_turn>");
  tokens.has_vision = dims.vision.has_value();
  if (tokens.has_vision) {
    tokens.start_of_image = need("<start_of_image>");
    tokens.end_of_image = need("<end_of_image>");
    tokens.image_soft = need("<image_soft_token>");
    tokens.tokens_per_image = int32_t(dims.tokens_per_image);
    if (tokens.start_of_image != dims.start_of_image || tokens.end_of_image != dims.end_of_image ||
        tokens.image_soft != dims.image_token) {
      throw input_error(
          "{}: start_of_image, end_of_image, image token are {}, {}, {}; config.json says {}, {}, {}: tokenizer and model do not "
          "belong together",
          where, tokens.start_of_image, tokens.end_of_image, tokens.image_soft, dims.start_of_image, dims.end_of_image,
          dims.image_token);
    }
  }
  if (tokenizer.vocab_size() > dims.text.vocabulary + (tokens.has_vision ? 0 : 1)) {
    throw input_error("{}: has {} tokens, the model's table has {} rows: tokenizer and model do not belong together", where,
                      tokenizer.vocab_size(), dims.text.vocabulary);
  }
  return tokens;
}

Preparation prepare(const Recipe& recipe, Source source) {
  Preparation out;
  out.model_folder = model_folder(recipe);
  out.dims = read_dims(out.model_folder);
  const std::string tokenizer = recipe.model.tokenizer.empty() ? out.model_folder : recipe.model.tokenizer;
  out.tokenizer = Tokenizer::load(tokenizer);
  out.chat =
      std::make_shared<Chat>(out.tokenizer, chat_tokens(*out.tokenizer, out.dims, tokenizer), chat_options(recipe, out.dims));
  if (source == Source::kNone) return out;
  const auto& sources = source == Source::kTrain ? recipe.data.train : recipe.data.eval;
  if (sources.empty())
    throw input_error("data.{} is not set; give a source: data.{}=FILE", source == Source::kTrain ? "train" : "eval",
                      source == Source::kTrain ? "train" : "eval");
  std::vector<std::string> found;
  for (const std::string& name : sources) found.push_back(resolve(HubKind::kDataset, name));
  out.dataset = open_dataset(found, row_mapping(recipe));
  return out;
}

int accumulation_for(const Recipe& recipe, int world) {
  const int workers = recipe.dist.workers > 0 ? recipe.dist.workers : world;
  const int micro_batches = recipe.train.accumulation * workers;
  if (micro_batches % world != 0) {
    throw input_error(
        "a step has train.accumulation {} × dist.workers {} = {} micro-batches, which {} ranks cannot share evenly; use a number "
        "of ranks that divides it",
        recipe.train.accumulation, workers, micro_batches, world);
  }
  return micro_batches / world;
}

int loader_threads(const Recipe& recipe) {
  return recipe.data.num_workers > 0 ? recipe.data.num_workers : int(std::max(1u, std::thread::hardware_concurrency()));
}

int image_size(const Dims& dims) {
  return dims.vision ? int(dims.vision->image_size) : 0;
}

}  // namespace gemtune
