// RUN_DIR/report.html: one self-contained page that opens offline in any browser.
#include "app/commands.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "train/metrics.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace gemtune {
namespace {

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string base64(std::string_view bytes) {
  constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    for (size_t j = 0; j < 3; ++j) word = word << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0);
    for (size_t j = 0; j < 4; ++j) out += i + j <= bytes.size() ? kAlphabet[word >> (18 - 6 * j) & 63] : '=';
  }
  return out;
}

struct Series {
  std::string title;
  std::string field;
  bool from_zero = false;
};

struct Point {
  double step;
  double value;
};

std::vector<Json> read_metrics(const std::string& path) {
  std::vector<Json> records;
  if (!file_exists(path)) throw input_error("{}: no such file; RUN_DIR is a folder that `gemtune train` wrote", path);
  const std::string content = read_file(path);
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const Json record = Json::parse(content.substr(begin, end - begin), nullptr, /*allow_exceptions=*/false);
    if (record.is_object()) records.push_back(record);
    begin = end + 1;
  }
  return records;
}

std::vector<Point> points_of(const std::vector<Json>& records, const std::string& field) {
  std::vector<Point> points;
  for (const Json& record : records) {
    if (record.contains(field) && record.at(field).is_number())
      points.push_back({record.at("step").get<double>(), record.at(field).get<double>()});
  }
  return points;
}

// Round numbers of 1, 2 or 5 times a power of ten that cover [low, high] in about five steps.
std::vector<double> ticks(double low, double high) {
  const double rough = (high - low) / 5;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double ratio = rough / power;
  const double gap = power * (ratio < 1.5 ? 1 : ratio < 3.5 ? 2 : ratio < 7.5 ? 5 : 10);
  std::vector<double> out;
  for (double at = std::ceil(low / gap) * gap; at <= high + gap * 1e-9; at += gap)
    out.push_back(std::fabs(at) < gap * 1e-9 ? 0 : at);
  return out;
}

std::string chart(const Series& series, const std::vector<Point>& points) {
  if (points.empty()) return "";
  constexpr double kWidth = 440, kHeight = 220, kLeft = 56, kRight = 12, kTop = 12, kBottom = 28;
  double low = series.from_zero ? 0 : points[0].value;
  double high = points[0].value;
  for (const Point& point : points) {
    low = std::min(low, point.value);
    high = std::max(high, point.value);
  }
  if (high <= low) high = low + std::max(1e-12, std::fabs(low) * 0.1 + 1e-12);
  const double first = points.front().step;
  const double last = std::max(points.back().step, first + 1);
  const auto x = [&](double step) { return kLeft + (step - first) / (last - first) * (kWidth - kLeft - kRight); };
  const auto y = [&](double value) { return kHeight - kBottom - (value - low) / (high - low) * (kHeight - kTop - kBottom); };
  std::string svg =
      fmt::format("<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{} by step\">",
                  escaped(series.title), kWidth, kHeight, escaped(series.title));
  for (const double at : ticks(low, high)) {
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text x=\"{}\" y=\"{:.1f}\" class=\"y\">{}</text>",
        kLeft, kWidth - kRight, y(at), y(at), kLeft - 6, y(at) + 4, short_number(at));
  }
  for (const double at : ticks(first, last)) {
    if (at == std::floor(at))
      svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" class=\"x\">{}</text>", x(at), kHeight - 8, short_number(at));
  }
  svg += "<polyline points=\"";
  for (const Point& point : points) svg += fmt::format("{:.1f},{:.1f} ", x(point.step), y(point.value));
  return svg + "\"/></svg></figure>\n";
}

std::string samples_section(const std::string& run_dir) {
  const std::string folder = join_path(run_dir, "samples");
  const std::string path = join_path(folder, "samples.json");
  if (!file_exists(path)) return "";
  std::string html = "<h2>Held-out samples</h2>\n<div class=\"samples\">\n";
  for (const Json& sample : read_json_file(path)) {
    html += "<article>";
    for (const Json& name : sample.at("pictures")) {
      html += fmt::format("<img alt=\"\" src=\"data:image/png;base64,{}\">",
                          base64(read_file(join_path(folder, base_name(name.get<std::string>())))));
    }
    html += "<dl>";
    const auto add = [&](const char* label, const char* key) {
      if (sample.contains(key)) html += fmt::format("<dt>{}</dt><dd>{}</dd>", label, escaped(sample.at(key).get<std::string>()));
    };
    add("prompt", "prompt");
    add("before", "before");
    add(sample.value("after", "") == sample.value("expected", "") ? "after ✓" : "after ✗", "after");
    add("expected", "expected");
    html += "</dl></article>\n";
  }
  return html + "</div>\n";
}

std::string scores_section(const std::string& run_dir) {
  const std::string path = join_path(run_dir, "eval.json");
  if (!file_exists(path)) return "";
  const auto scores = nlohmann::ordered_json::parse(read_file(path));
  std::string html = "<h2>Held-out scores</h2>\n<table>";
  for (const auto& [name, value] : scores.items()) {
    html += fmt::format("<tr><th>{}</th><td>{}</td></tr>", escaped(name),
                        value.is_number() ? short_number(value.get<double>()) : escaped(value.dump()));
  }
  return html + "</table>\n";
}

constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--ink:#1c2430;--soft:#667085;--line:#d9dee7;--back:#fff;--mark:#2563eb}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#344054;--back:#14181f;--mark:#7aa2ff}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .6rem}p.sub{color:var(--soft);margin:.2rem 0 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:1rem}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:.6rem}figcaption{font-weight:600;font-size:.9rem}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}text.y{text-anchor:end}text.x{text-anchor:middle}
.grid{stroke:var(--line)}polyline{fill:none;stroke:var(--mark);stroke-width:1.6;stroke-linejoin:round}
table{border-collapse:collapse}th,td{text-align:left;padding:.2rem 1.2rem .2rem 0;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}th{font-weight:500;color:var(--soft)}
.samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:1rem}
article{border:1px solid var(--line);border-radius:8px;padding:.8rem;display:flex;gap:.8rem}article img{width:84px;height:84px;object-fit:contain;image-rendering:pixelated;background:#000;border-radius:4px}
dl{margin:0;min-width:0}dt{color:var(--soft);font-size:.75rem}dd{margin:0 0 .35rem;overflow-wrap:anywhere}
pre{border:1px solid var(--line);border-radius:8px;padding:.8rem;overflow:auto;font-size:.8rem}
)";

}  // namespace

int run_report(const ReportCommand& command) {
  const auto records = read_metrics(join_path(command.run_dir, "metrics.jsonl"));
  const std::string name = base_name(command.run_dir);
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>{} – gemtune</title><style>{}</style></head><body>\n",
      escaped(name), kStyle);
  const auto losses = points_of(records, "loss");
  html += fmt::format("<h1>{}</h1>\n<p class=\"sub\">gemtune {}", escaped(name), GEMTUNE_VERSION);
  if (!losses.empty())
    html += fmt::format(" · {} steps · last loss {:.4f}", short_number(losses.back().step), losses.back().value);
  html += "</p>\n" + scores_section(command.run_dir) + samples_section(command.run_dir);
  html += "<h2>Training</h2>\n<div class=\"charts\">\n";
  const Series all[] = {{"loss (nats a target token)", "loss", true},
                        {"token accuracy", "mean_token_accuracy", true},
                        {"gradient norm before clipping", "grad_norm", true},
                        {"learning rate", "learning_rate", true},
                        {"held-out loss", "eval_loss", true},
                        {"samples a second", "samples_per_s", true}};
  for (const Series& series : all) html += chart(series, points_of(records, series.field));
  html += "</div>\n";
  const std::string recipe = join_path(command.run_dir, "recipe.yaml");
  if (file_exists(recipe)) html += "<h2>Recipe</h2>\n<pre>" + escaped(read_file(recipe)) + "</pre>\n";
  html += "</body></html>\n";
  const std::string path = join_path(command.run_dir, "report.html");
  write_file_atomically(path, html);
  log_info("{}", path);
  return 0;
}

}  // namespace gemtune
