// Shows what the engine computes, as safetensors, for the parity tests:
//   gemtune_probe --model DIR --inputs FILE --out FILE    logits, every tap, loss_sum, num_targets, with --gradients also
//                                                         grad.KEY for each trained tensor (of the mean loss); further
//                                                         --inputs, --out pairs may follow
//   gemtune_probe --quantize FILE --out FILE              codes and scales of each tensor in FILE
// Inputs: token_ids i64 [B, T], valid u8, target_mask u8, image_group i32 (−1 outside images), pixels f32 [N, 3, S, S].
#include "base/error.h"
#include "base/log.h"
#include "model/model.h"
#include "model/tensor_file.h"
#include "ops/torch.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <set>

using namespace gemtune;

namespace {

class Arguments {
 public:
  Arguments(int argc, char** argv) {
    const std::set<std::string> switches = {"--quant-vision", "--recompute", "--gradients", "--train"};
    const std::set<std::string> options = {"--model",    "--inputs",       "--out",      "--adapter",
                                           "--targets",  "--rank",         "--tables",   "--quant",
                                           "--quantize", "--dump-weights", "--dump-nf4", "--save-adapter"};
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (switches.count(word) != 0) {
        values_[word].push_back("yes");
      } else if (options.count(word) != 0 && i + 1 < argc) {
        values_[word].push_back(argv[++i]);
      } else {
        throw input_error("{}: unknown argument, or its value is missing", word);
      }
    }
  }
  bool has(const std::string& name) const { return values_.count(name) != 0; }
  std::string get(const std::string& name, const std::string& otherwise = "") const {
    const auto it = values_.find(name);
    return it == values_.end() ? otherwise : it->second.back();
  }
  std::string need(const std::string& name) const {
    if (!has(name)) throw input_error("{} is missing", name);
    return get(name);
  }
  std::vector<std::string> all(const std::string& name) const {
    const auto it = values_.find(name);
    return it == values_.end() ? std::vector<std::string>() : it->second;
  }
  // Position of the value in `choices`; absent: the first.
  size_t choice(const std::string& name, const std::vector<std::string>& choices) const {
    const auto it = std::find(choices.begin(), choices.end(), get(name, choices[0]));
    if (it == choices.end()) throw input_error("{} {}: not one of the choices", name, get(name));
    return size_t(it - choices.begin());
  }

 private:
  std::map<std::string, std::vector<std::string>> values_;
};

ModelSpec model_spec(const Arguments& arguments) {
  ModelSpec spec;
  spec.table_dtype = at::kFloat;  // gradients are compared in fp32
  spec.lora.rank = 0;
  if (arguments.has("--adapter")) {
    const AdapterConfig config = read_adapter_config(arguments.get("--adapter"));
    spec.lora = config.lora;
    spec.tables = config.tables;
  }
  if (arguments.has("--targets")) {
    const size_t targets = arguments.choice("--targets", {"none", "language", "vision", "all-linear"});
    spec.lora.rank = targets == 0 ? 0 : std::stoll(arguments.get("--rank", "4"));
    spec.lora.language = targets == 1 || targets == 3;
    spec.lora.vision = targets == 2 || targets == 3;
  }
  if (arguments.has("--tables")) {
    constexpr Tables kTables[] = {Tables::kFrozen, Tables::kTied, Tables::kUntied};
    spec.tables = kTables[arguments.choice("--tables", {"none", "tied", "untied"})];
  }
  const size_t quant = arguments.choice("--quant", {"none", "nf4", "nf4-double"});
  spec.quant = {quant > 0, quant == 2, arguments.has("--quant-vision")};
  return spec;
}

ModelInput read_inputs(const SafetensorsFile& file, Tensor& target_mask_BT) {
  const auto read = [&](const char* name) {
    const TensorEntry* entry = file.find(name);
    return entry == nullptr ? Tensor() : tensor_view(file, *entry).clone();
  };
  ModelInput input;
  input.token_ids_BT = read("token_ids");
  input.valid_BT = read("valid").to(at::kBool);
  input.image_group_BT = read("image_group");
  input.pixels_NCHW = read("pixels");
  target_mask_BT = read("target_mask").to(at::kBool);
  return input;
}

void add_nf4(TensorFileWriter& out, const std::string& name, const Nf4Tensor& tensor) {
  out.add(name + ".codes", tensor.codes);
  if (tensor.nested()) {
    out.add(name + ".absmax_codes", tensor.absmax_codes);
    out.add(name + ".absmax2", tensor.absmax2);
    out.add(name + ".code8", tensor.code8);
    out.add(name + ".offset", at::scalar_tensor(tensor.offset, at::kFloat));
  } else {
    out.add(name + ".absmax", tensor.absmax);
  }
  out.add(name + ".dequantized", nf4_dequantize(tensor, tensor.dtype));
}

void quantize_file(const Arguments& arguments) {
  const SafetensorsFile file(arguments.get("--quantize"));
  TensorFileWriter out;
  for (const TensorEntry& entry : file.entries()) {
    add_nf4(out, entry.name, nf4_quantize(tensor_view(file, entry), arguments.get("--quant") == "nf4-double"));
  }
  out.write(arguments.need("--out"));
}

void dump_model(const Arguments& arguments, Gemma3& model) {
  if (arguments.has("--dump-weights")) {
    TensorFileWriter out;
    for (const auto& [name, tensor] : model.weights()) out.add(name, tensor);
    out.write(arguments.get("--dump-weights"));
  }
  if (arguments.has("--dump-nf4")) {
    TensorFileWriter out;
    for (const Linear* linear : model.linears()) {
      if (linear->weight.nf4) add_nf4(out, linear->name, *linear->weight.nf4);
    }
    out.write(arguments.get("--dump-nf4"));
  }
  if (arguments.has("--save-adapter")) {
    make_folders(arguments.get("--save-adapter"));
    save_adapter(model, arguments.get("--save-adapter"), arguments.get("--model"));
  }
}

void run_model(const Arguments& arguments, const Gemma3& model, const std::string& inputs, const std::string& to) {
  const SafetensorsFile file(inputs);
  Tensor target_mask_BT;
  const ModelInput input = read_inputs(file, target_mask_BT);
  TensorFileWriter out;
  const Tap tap = [&out](std::string_view name, int64_t layer, const Tensor& value) {
    out.add(layer < 0 ? std::string(name) : fmt::format("{}.{}", name, layer), value);
  };
  Pass pass;
  pass.tap = &tap;
  pass.dropout_seed = 42;
  if (arguments.has("--train")) pass.mode = Pass::Mode::kTrain;
  pass.recompute_vision = pass.recompute_language = arguments.has("--recompute");
  const at::AutoGradMode with_gradients(arguments.has("--gradients"));

  const Tensor hidden_BTD = model.forward(input, pass);
  const CrossEntropySum loss = model.loss(hidden_BTD, find_targets(input.token_ids_BT, target_mask_BT));
  const Tensor num_targets = target_mask_BT.narrow(1, 1, target_mask_BT.size(1) - 1).sum();
  {
    const at::NoGradGuard no_grad;
    out.add("logits", model.logits(hidden_BTD.detach()));
  }
  out.add("loss_sum", loss.loss_sum);
  out.add("num_correct", loss.num_correct);
  out.add("num_targets", num_targets);
  if (arguments.has("--gradients")) {
    (loss.loss_sum / num_targets).backward();
    for (const Parameter& parameter : model.parameters()) {
      Tensor& gradient = parameter.value.mutable_grad();
      if (gradient.defined()) out.add("grad." + parameter.key, gradient);
      gradient = Tensor();
    }
  }
  out.write(to);
}

void run(const Arguments& arguments) {
  if (arguments.has("--quantize")) return quantize_file(arguments);
  const auto model = Gemma3::load(arguments.need("--model"), model_spec(arguments));
  if (arguments.has("--adapter")) load_adapter(*model, arguments.get("--adapter"));
  dump_model(arguments, *model);
  const auto inputs = arguments.all("--inputs");
  const auto outputs = arguments.all("--out");
  if (inputs.size() != outputs.size()) throw input_error("{} --inputs, {} --out: give pairs", inputs.size(), outputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) run_model(arguments, *model, inputs[i], outputs[i]);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(Arguments(argc, argv));
    return 0;
  } catch (const Error& error) {
    log_line(LogLevel::kError, error.what());
    return int(error.code());
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, error.what());
    return int(ExitCode::kJobFailed);
  }
}
