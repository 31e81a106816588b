# cmake -DBUILD= -DWORK= -DCONSUMER= -DBUILD_TYPE= -DCXX= -DCXX_FLAGS= -DGENERATOR= -P install_test.cmake
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${command}\nfailed (${result}):\n${output}")
  endif()
  message("${output}")
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/consumer)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)

# Nothing of this checkout may leak: neither our warning flags nor a path.
file(GLOB_RECURSE exported ${WORK}/prefix/*.cmake)
foreach(file ${exported})
  file(READ ${file} text)
  cmake_path(GET CONSUMER PARENT_PATH here)
  cmake_path(GET here PARENT_PATH tests)
  cmake_path(GET tests PARENT_PATH checkout)
  string(FIND "${text}" "${checkout}" path_at)
  string(FIND "${text}" "pagedkv_flags" flags_at)
  if(path_at GREATER -1 OR flags_at GREATER -1)
    message(FATAL_ERROR "${file} names this checkout or pagedkv_flags:\n${text}")
  endif()
endforeach()

run(${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK}/consumer -G ${GENERATOR} -DCMAKE_BUILD_TYPE=${BUILD_TYPE}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${CXX_FLAGS} -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/consumer)
run(${WORK}/consumer/consumer)
