#include "cluster/document.h"

#include "base/error.h"
#include "base/text.h"

#include <yaml-cpp/yaml.h>

#include <charconv>
#include <cmath>
#include <regex>

namespace gemtune {
namespace {

Document scalar_of(const std::string& text) {
  if (text.empty() || text == "null" || text == "~") return nullptr;
  if (text == "true") return true;
  if (text == "false") return false;
  const char* end = text.data() + text.size();
  int64_t whole = 0;
  if (const auto read = std::from_chars(text.data(), end, whole); read.ec == std::errc() && read.ptr == end) return whole;
  double number = 0;
  const bool starts_as_number = std::string_view("0123456789-.").find(text[0]) != std::string_view::npos;
  if (const auto read = std::from_chars(text.data(), end, number);
      starts_as_number && read.ec == std::errc() && read.ptr == end && std::isfinite(number)) {
    return number;
  }
  return text;
}

Document from_node(const YAML::Node& node, const std::string& where) {
  switch (node.Type()) {
    case YAML::NodeType::Map: {
      Document map = Document::object();
      for (const auto& entry : node) {
        const std::string key = entry.first.as<std::string>();
        if (map.contains(key)) {
          throw input_error("{}:{}: the key {} stands twice; keep one of them", where, entry.first.Mark().line + 1,
                            in_quotes(key));
        }
        map[key] = from_node(entry.second, where);
      }
      return map;
    }
    case YAML::NodeType::Sequence: {
      Document list = Document::array();
      for (const auto& item : node) list.push_back(from_node(item, where));
      return list;
    }
    case YAML::NodeType::Scalar:
      // "!" is yaml-cpp's mark of a quoted scalar.
      return node.Tag() == "!" ? Document(node.Scalar()) : scalar_of(node.Scalar());
    default:
      return nullptr;
  }
}

const Document& value_of(const std::map<std::string, Document>& values, const std::string& name, const std::string& where) {
  const auto found = values.find(name);
  if (found == values.end()) throw input_error("{}: {{{{{}}}}} has no value; the template names something unknown", where, name);
  return found->second;
}

Document fill_text(const std::string& text, const std::map<std::string, Document>& values, const std::string& where) {
  std::string out;
  size_t at = 0;
  while (true) {
    const size_t open = text.find("{{", at);
    if (open == std::string::npos) break;
    const size_t close = text.find("}}", open);
    if (close == std::string::npos) throw input_error("{}: {} opens {{{{ and never closes it", where, in_quotes(text));
    const std::string name = text.substr(open + 2, close - open - 2);
    const Document& value = value_of(values, name, where);
    if (open == 0 && close + 2 == text.size()) return value;
    out.append(text, at, open - at);
    if (value.is_structured() || value.is_null()) {
      throw input_error("{}: {{{{{}}}}} inside text needs a text or a number", where, name);
    }
    out += value.is_string() ? value.get<std::string>() : value.dump();
    at = close + 2;
  }
  return out + text.substr(at);
}

// Words that some YAML reader takes for something other than text, and characters that end plain text.
bool is_plain(const std::string& text) {
  static const std::regex safe("[A-Za-z_/][A-Za-z0-9_./=@+-]*( [A-Za-z0-9_./=@+-]+)*");
  static const std::regex word("(true|false|yes|no|on|off|null|y|n)", std::regex::icase);
  return std::regex_match(text, safe) && !std::regex_match(text, word);
}

bool is_block(const std::string& text) {
  if (text.find('\n') == std::string::npos || text[0] == ' ' || text[0] == '\n') return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c < 0x20 && c != '\n') return false;
    if (c == ' ' && (i + 1 == text.size() || text[i + 1] == '\n')) return false;  // a space at a line's end is easily lost
  }
  return !text.ends_with("\n\n");
}

void write_scalar(std::string& out, const Document& value, size_t indent) {
  if (!value.is_string()) {
    out += value.dump() + "\n";
    return;
  }
  const std::string& text = value.get_ref<const std::string&>();
  if (is_plain(text)) {
    out += text + "\n";
  } else if (is_block(text)) {
    out += text.ends_with('\n') ? "|\n" : "|-\n";
    size_t at = 0;
    while (at < text.size()) {
      const size_t end = std::min(text.find('\n', at), text.size());
      if (end > at) out += std::string(indent, ' ') + text.substr(at, end - at);
      out += "\n";
      at = end + 1;
    }
  } else {
    out += value.dump() + "\n";  // a JSON string is a YAML string
  }
}

void write(std::string& out, const Document& value, size_t indent, bool after_dash) {
  const std::string margin(indent, ' ');
  if (value.is_object() && !value.empty()) {
    bool first = after_dash;
    for (const auto& [key, member] : value.items()) {
      out += first ? "" : margin;
      first = false;
      out += (is_plain(key) ? key : Document(key).dump()) + ":";
      if (member.is_structured() && !member.empty()) {
        out += "\n";
        write(out, member, member.is_array() ? indent : indent + 2, false);
      } else {
        out += " ";
        write_scalar(out, member, indent + 2);
      }
    }
  } else if (value.is_array() && !value.empty()) {
    for (const Document& item : value) {
      out += margin + "- ";
      if (item.is_structured() && !item.empty() && !item.is_array()) {
        write(out, item, indent + 2, true);
      } else if (item.is_array() && !item.empty()) {
        out += item.dump() + "\n";
      } else {
        write_scalar(out, item, indent + 2);
      }
    }
  } else {
    out += margin + value.dump() + "\n";
  }
}

}  // namespace

Document parse_yaml_document(std::string_view text, const std::string& where) {
  try {
    return from_node(YAML::Load(std::string(text)), where);
  } catch (const YAML::Exception& error) {
    throw input_error("{}:{}: not valid YAML: {}", where, error.mark.line + 1, error.msg);
  }
}

Document fill_template(const Document& form, const std::map<std::string, Document>& values, const std::string& where) {
  if (form.is_object()) {
    Document map = Document::object();
    for (const auto& [key, member] : form.items()) {
      Document filled = fill_template(member, values, where);
      if (!filled.is_null()) map[key] = std::move(filled);
    }
    return map;
  }
  if (form.is_array()) {
    Document list = Document::array();
    for (const Document& item : form) {
      Document filled = fill_template(item, values, where);
      if (!filled.is_null()) list.push_back(std::move(filled));
    }
    return list;
  }
  return form.is_string() ? fill_text(form.get<std::string>(), values, where) : form;
}

std::string to_yaml(const Document& document) {
  std::string out;
  write(out, document, 0, false);
  return out;
}

std::string to_yaml_stream(const std::vector<Document>& documents) {
  std::string out;
  for (const Document& document : documents) out += "---\n" + to_yaml(document);
  return out;
}

}  // namespace gemtune
