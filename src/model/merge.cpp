#include "model/merge.h"

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "model/adapter_keys.h"
#include "model/tensor_file.h"
#include "ops/torch.h"

#include <ATen/ops/matmul.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace gemtune {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string shape_text(const std::vector<int64_t>& shape) {
  return Json(shape).dump();
}

OrderedJson read_ordered(const std::string& path) {
  read_json_file(path);  // throws what is wrong with it
  return OrderedJson::parse(read_file(path));
}

// An adapter folder's tensors by canonical weight name, every one of them fitted to the model's table of weights.
class AdapterTensors {
 public:
  AdapterTensors(const std::string& folder, const Dims& dims)
      : config_(read_adapter_config(folder)), file_(join_path(folder, "adapter_model.safetensors")) {
    const bool has_vision = dims.vision.has_value();
    for (const TensorEntry& entry : file_.entries()) {
      const AdapterKey key = parse_adapter_key(entry.name, has_vision);
      entries_[key.module + ".weight"][key.part] = &entry;
      if (key.module.empty()) faults_.push_back(fmt::format("{}: no such module in this model", entry.name));
    }
    entries_.erase(".weight");
    std::map<std::string, WeightRow> rows;
    for (const WeightRow& row : weight_table(dims)) rows[row.name] = row;
    if (dims.tied_head) {
      WeightRow head = rows.at(embed_name(dims));
      head.name = "lm_head.weight";
      rows[head.name] = head;
    }
    for (const auto& [name, parts] : entries_) check(name, parts, rows);
    if (!faults_.empty()) {
      throw input_error("{}: {} of {} tensors do not fit the model: {}", file_.path(), faults_.size(), file_.entries().size(),
                        join_some(faults_));
    }
  }

  static std::string embed_name(const Dims& dims) {
    return dims.vision ? "model.language_model.embed_tokens.weight" : "model.embed_tokens.weight";
  }
  Tables tables() const { return config_.tables; }

  // The trained table of this name, or undefined.
  Tensor table(const std::string& name) const {
    const auto it = entries_.find(name);
    return it == entries_.end() || it->second.count('T') == 0 ? Tensor() : view(it->second, 'T');
  }
  bool has_product(const std::string& name) const {
    const auto it = entries_.find(name);
    return it != entries_.end() && it->second.count('A') != 0;
  }
  // scale · B A in fp32.
  Tensor product(const std::string& name, Tower tower) const {
    const auto& parts = entries_.at(name);
    return at::matmul(view(parts, 'B').to(at::kFloat), view(parts, 'A').to(at::kFloat)) * config_.lora.scale_of(tower);
  }

 private:
  using Parts = std::map<char, const TensorEntry*>;
  Tensor view(const Parts& parts, char part) const { return tensor_view(file_, *parts.at(part)); }

  void check(const std::string& name, const Parts& parts, const std::map<std::string, WeightRow>& rows) {
    const auto row = rows.find(name);
    const auto fault = [&](const TensorEntry& entry, const std::string& text) {
      faults_.push_back(fmt::format("{}: {}", entry.name, text));
    };
    const TensorEntry& any = *parts.begin()->second;
    if (row == rows.end()) return fault(any, "no such module in this model");
    if (const auto whole = parts.find('T'); whole != parts.end()) {
      const TensorEntry& entry = *whole->second;
      if (row->second.kind != WeightKind::kTable) fault(entry, "gemtune merges whole matrices of embedding tables only");
      if (entry.shape != row->second.shape)
        fault(entry, fmt::format("expected shape {}, got {}", shape_text(row->second.shape), shape_text(entry.shape)));
      return;
    }
    if (row->second.kind != WeightKind::kLinear) return fault(any, "adapters on linear layers are merged, this is none");
    if (parts.count('A') == 0 || parts.count('B') == 0)
      return fault(any, fmt::format("its lora_{} is missing", parts.count('A') == 0 ? 'A' : 'B'));
    const int64_t rank = config_.lora.rank_of(row->second.tower);
    const auto expect = [&](char part, const std::vector<int64_t>& shape) {
      const TensorEntry& entry = *parts.at(part);
      if (entry.shape != shape)
        fault(entry, fmt::format("expected shape {}, got {}", shape_text(shape), shape_text(entry.shape)));
    };
    expect('A', {rank, row->second.shape[1]});
    expect('B', {row->second.shape[0], rank});
  }

  AdapterConfig config_;
  SafetensorsFile file_;
  std::map<std::string, Parts> entries_;
  std::vector<std::string> faults_;
};

class Merger {
 public:
  Merger(const std::string& model_folder, const std::string& adapter_folder, const std::string& out,
         const std::optional<QuantSpec>& onto)
      : folder_(model_folder),
        out_(out),
        onto_(onto),
        dims_(read_dims(model_folder)),
        base_(require_original(model_folder, dims_)),
        adapter_(adapter_folder, dims_) {
    for (const WeightRow& row : weight_table(dims_)) rows_[row.name] = row;
    report_.untied = dims_.tied_head && adapter_.tables() == Tables::kUntied;
  }

  MergeReport merge() {
    for (const auto& file : base_.files()) merge_file(*file);
    write_index();
    write_config();
    return report_;
  }

 private:
  // Opens the folder after everything that can be known from headers was found right.
  static TensorFolder require_original(const std::string& folder, const Dims& dims) {
    const FolderCheck check = check_weights(folder, dims);
    if (!check.weights_found)
      throw input_error("{}: no model.safetensors or model.safetensors.index.json; give the model that was trained on", folder);
    TensorFolder tensors(folder);
    for (const auto& [name, found] : tensors.tensors()) {
      if (name.ends_with(".quant_map"))
        throw input_error(
            "{}: {}: the weights are 4-bit; a sum rounded to 4 bits loses what was trained: give the original model to --model",
            folder, name);
    }
    if (!check.faults.empty()) throw input_error("{}", join_some(check.faults));
    return tensors;
  }

  void merge_file(const SafetensorsFile& file) {
    TensorFileWriter writer;
    for (const TensorEntry& entry : file.entries()) {
      const std::string name = canonical_name(entry.name, dims_.vision.has_value());
      const Tensor base = tensor_view(file, entry);
      add(writer, entry.name, merged(name, base));
      if (name == AdapterTensors::embed_name(dims_) && report_.untied && base_head_name().empty()) {
        // Two tables now; both stand in this file, and the index says so.
        added_head_ = {entry.name.starts_with("language_model.") ? "language_model.lm_head.weight" : "lm_head.weight",
                       base_name(file.path())};
        add(writer, added_head_.first, merged("lm_head.weight", base));
      }
    }
    std::map<std::string, std::string> metadata = file.metadata();
    writer.write(join_path(out_, base_name(file.path())), metadata);
  }

  void add(TensorFileWriter& writer, const std::string& name, const Tensor& tensor) {
    writer.add(name, tensor);
    report_.num_tensors += 1;
    report_.num_bytes += int64_t(tensor.nbytes());
  }

  // The base's own lm_head tensor, or "": tied folders may hold a copy.
  std::string base_head_name() const {
    for (const auto& [name, found] : base_.tensors()) {
      if (canonical_name(name, dims_.vision.has_value()) == "lm_head.weight") return name;
    }
    return "";
  }

  // numerics: one rounding, of the fp32 sum.
  Tensor merged(const std::string& name, const Tensor& base) {
    const bool head_of_tied = name == "lm_head.weight" && dims_.tied_head;
    // A tied base's copy of the head follows the one table; with two tables each has its own, or the base's.
    const std::string table = head_of_tied && !report_.untied ? AdapterTensors::embed_name(dims_) : name;
    if (const Tensor trained = adapter_.table(table); trained.defined()) {
      report_.num_tables += 1;
      return trained.to(base.scalar_type());
    }
    const auto row = rows_.find(name);
    if (row == rows_.end() || row->second.kind != WeightKind::kLinear) return base;
    const Tower tower = row->second.tower;
    const bool product = adapter_.has_product(name);
    const bool quantised = onto_ && onto_->nf4 && (tower == Tower::kLanguage || onto_->vision);
    if (!product && !quantised) return base;
    Tensor sum = base.to(at::kFloat);
    if (quantised) sum = nf4_dequantize(nf4_quantize(base, onto_->double_quant), at::kFloat);
    if (product) {
      sum = sum + adapter_.product(name, tower);
      report_.num_merged += 1;
    }
    return sum.to(base.scalar_type());
  }

  void write_index() const {
    const std::string name = "model.safetensors.index.json";
    if (!file_exists(join_path(folder_, name)) || file_exists(join_path(folder_, "model.safetensors"))) return;
    OrderedJson index = read_ordered(join_path(folder_, name));
    if (!added_head_.first.empty()) {
      index["weight_map"][added_head_.first] = added_head_.second;
      OrderedJson& metadata = index["metadata"];
      metadata["total_size"] = report_.num_bytes;
      if (metadata.contains("total_parameters")) {
        const WeightRow& table = rows_.at(AdapterTensors::embed_name(dims_));
        metadata["total_parameters"] = metadata["total_parameters"].get<int64_t>() + table.num_elements();
      }
    }
    write_file_atomically(join_path(out_, name), index.dump(2) + "\n");
  }

  void write_config() const {
    const std::string from = join_path(folder_, "config.json");
    if (!report_.untied) return write_file_atomically(join_path(out_, "config.json"), read_file(from));
    // Both places: loaders of either kind would tie again and drop the trained head.
    OrderedJson config = read_ordered(from);
    config["tie_word_embeddings"] = false;
    if (config.contains("text_config")) config["text_config"]["tie_word_embeddings"] = false;
    write_file_atomically(join_path(out_, "config.json"), config.dump(2) + "\n");
  }

  std::string folder_, out_;
  std::optional<QuantSpec> onto_;
  Dims dims_;
  TensorFolder base_;
  AdapterTensors adapter_;
  std::map<std::string, WeightRow> rows_;
  MergeReport report_;
  std::pair<std::string, std::string> added_head_;  // its name and its file
};

}  // namespace

MergeReport merge_adapter(const std::string& model_folder, const std::string& adapter_folder, const std::string& out,
                          const std::optional<QuantSpec>& onto) {
  const at::NoGradGuard no_grad;
  return Merger(model_folder, adapter_folder, out, onto).merge();
}

}  // namespace gemtune
