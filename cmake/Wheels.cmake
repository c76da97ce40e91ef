# Finds LibTorch and Arrow C++ inside the pinned Python environment and checks that they are the pinned releases.
# find_package(Torch) is not used: on a CUDA wheel it demands nvcc even for CPU targets.
set(GEMTUNE_PYTHON "" CACHE FILEPATH "interpreter of the pinned environment (tools/env.sh build); the Makefile passes it")
if(NOT GEMTUNE_PYTHON)
  execute_process(COMMAND "${CMAKE_CURRENT_SOURCE_DIR}/tools/env.sh" build OUTPUT_VARIABLE _environment
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(GEMTUNE_PYTHON "${_environment}/bin/python" CACHE FILEPATH "" FORCE)
endif()

file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/requirements/build.txt" _pins REGEX "^(torch|pyarrow)==")
foreach(_pin IN LISTS _pins)
  string(REGEX MATCH "^([a-z]+)==([0-9.]+)" _ "${_pin}")
  set(GEMTUNE_PIN_${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
endforeach()

execute_process(
  COMMAND "${GEMTUNE_PYTHON}" -c "import importlib.util as u, importlib.metadata as m, os
for name in ('torch', 'pyarrow'):
    spec = u.find_spec(name)
    print(os.path.dirname(spec.origin) if spec and spec.origin else 'NONE')
    print(m.version(name).split('+')[0] if spec else 'NONE')"
  OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" _found "${_found}")
list(GET _found 0 GEMTUNE_TORCH_DIR)
list(GET _found 1 _torch_version)
list(GET _found 2 GEMTUNE_ARROW_DIR)
list(GET _found 3 _arrow_version)
foreach(_name torch pyarrow)
  if(_name STREQUAL torch)
    set(_version "${_torch_version}")
  else()
    set(_version "${_arrow_version}")
  endif()
  if(NOT _version STREQUAL GEMTUNE_PIN_${_name})
    message(FATAL_ERROR "${GEMTUNE_PYTHON} has ${_name} ${_version}, requirements/build.txt pins ${GEMTUNE_PIN_${_name}}: "
      "headers and libraries must match exactly; run tools/env.sh build")
  endif()
endforeach()
foreach(_header c10/core/Device.h ATen/ops/add.h torch/csrc/autograd/custom_function.h)
  if(NOT EXISTS "${GEMTUNE_TORCH_DIR}/include/${_header}")
    message(FATAL_ERROR "${GEMTUNE_TORCH_DIR}/include lacks ${_header}: this torch wheel ships no C++ headers")
  endif()
endforeach()

function(gemtune_import name location)
  add_library(${name} SHARED IMPORTED GLOBAL)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION "${location}")
endfunction()
gemtune_import(gemtune::c10 "${GEMTUNE_TORCH_DIR}/lib/libc10.so")
gemtune_import(gemtune::torch_cpu "${GEMTUNE_TORCH_DIR}/lib/libtorch_cpu.so")
target_include_directories(gemtune::torch_cpu SYSTEM INTERFACE
  "${GEMTUNE_TORCH_DIR}/include" "${GEMTUNE_TORCH_DIR}/include/torch/csrc/api/include")
target_compile_definitions(gemtune::torch_cpu INTERFACE AT_PER_OPERATOR_HEADERS)
target_link_libraries(gemtune::torch_cpu INTERFACE gemtune::c10)
# libtorch_cpu.so needs the CUDA runtime of its own wheels, found through its own run path.
target_link_options(gemtune::torch_cpu INTERFACE "LINKER:--allow-shlib-undefined" "LINKER:-rpath-link,${GEMTUNE_TORCH_DIR}/lib")

file(GLOB _libarrow "${GEMTUNE_ARROW_DIR}/libarrow.so.[0-9]*")
file(GLOB _libparquet "${GEMTUNE_ARROW_DIR}/libparquet.so.[0-9]*")
gemtune_import(gemtune::arrow "${_libarrow}")
gemtune_import(gemtune::parquet "${_libparquet}")
target_include_directories(gemtune::arrow SYSTEM INTERFACE "${GEMTUNE_ARROW_DIR}/include")
target_link_options(gemtune::arrow INTERFACE "LINKER:--allow-shlib-undefined" "LINKER:-rpath-link,${GEMTUNE_ARROW_DIR}")
target_link_libraries(gemtune::parquet INTERFACE gemtune::arrow)
