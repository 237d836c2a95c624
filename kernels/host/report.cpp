// Names for people: source lines of call sites and of addresses.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <string>
#include <vector>

#include "host/block.h"

namespace kdtree::simt {

namespace {

// The last two parts of a path: enough to find the file, and the same on every machine.
std::string short_path(const std::string& path) {
  size_t slash = path.rfind('/');
  if (slash != std::string::npos && slash > 0) slash = path.rfind('/', slash - 1);
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

struct Frame {
  std::string function, line;
};

// What addr2line knows of an address: the innermost of the functions inlined there comes first. Empty without the tool.
std::vector<Frame> frames(const Dl_info& module, const void* pc) {
  const std::string path = module.dli_fname;
  if (path.find('\'') != std::string::npos) return {};  // it goes through a shell
  const auto offset = static_cast<const char*>(pc) - static_cast<const char*>(module.dli_fbase);
  FILE* pipe = popen(format("addr2line -Cfi -e '%s' 0x%tx 2>/dev/null", path.c_str(), offset).c_str(), "r");
  if (pipe == nullptr) return {};
  std::vector<std::string> lines(1);
  for (int c; (c = std::fgetc(pipe)) != EOF;) {
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += static_cast<char>(c);
    }
  }
  pclose(pipe);
  std::vector<Frame> result;
  for (size_t i = 0; i + 1 < lines.size(); i += 2) {
    result.push_back({lines[i], short_path(lines[i + 1].substr(0, lines[i + 1].find(" (")))});
  }
  return result;
}

std::string module_offset(const Dl_info& module, const void* pc) {
  return format("%s+0x%tx", short_path(module.dli_fname).c_str(),
                static_cast<const char*>(pc) - static_cast<const char*>(module.dli_fbase));
}

}  // namespace

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(std::vsnprintf(nullptr, 0, pattern, arguments), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  va_end(arguments);
  return text;
}

std::string to_string(Site at) { return format("%s:%u", short_path(at.file_name()).c_str(), at.line()); }

std::string source_line(const void* pc) {
  Dl_info module;
  if (dladdr(pc, &module) == 0) return format("%p", pc);
  for (const Frame& frame : frames(module, pc)) {
    if (frame.line.rfind("host/simt.h", 0) != 0 && frame.line[0] != '?') return frame.line;
  }
  return module_offset(module, pc);
}

std::string function_name(const void* pc) {
  Dl_info module;
  if (dladdr(pc, &module) == 0) return format("kernel at %p", pc);
  const std::vector<Frame> known = frames(module, pc);
  if (known.empty() || known.back().function[0] == '?') return "kernel at " + module_offset(module, pc);
  std::string name = known.back().function;
  const std::string anonymous = "(anonymous namespace)::";
  for (size_t at; (at = name.find(anonymous)) != std::string::npos;) name.erase(at, anonymous.size());
  name = name.substr(0, name.find('('));
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);  // of a template's instance
  return name;
}

}  // namespace kdtree::simt
