#!/bin/sh
# Build DJL Serving's HTTP front end and its Python engine: build.sh SOURCE OUT
#
# SOURCE is a checkout of deepjavalibrary/djl-serving; the result is OUT/lib/*.jar. One javac call, with Maven for the
# libraries, because Gradle would configure all of DJL's modules and plugins for the four that are needed.
set -eu
source=$(CDPATH='' cd -- "$1" && pwd)
mkdir -p "$2/lib"
out=$(CDPATH='' cd -- "$2" && pwd)
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
version=$(sed -n 's/.*<djl\.version>\(.*\)<.*/\1/p' "$here/pom.xml")

mvn --batch-mode --quiet --file "$here/pom.xml" \
    org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$out/lib"

classes=$(mktemp -d)
sources=$(mktemp)
trap 'rm -rf "$classes" "$sources"' EXIT
for module in wlm prometheus engines/python serving; do
    find "$source/$module/src/main/java" -name '*.java' ! -name module-info.java >>"$sources"
    if [ -d "$source/$module/src/main/resources" ]; then
        cp -R "$source/$module/src/main/resources/." "$classes/"
    fi
done
javac -nowarn --release 17 -encoding UTF-8 -classpath "$out/lib/*" -d "$classes" @"$sources"

# The Python part, with the list of files that the engine unpacks.
cp "$source/engines/python/setup/djl_python_engine.py" "$classes/"
cp -R "$source/engines/python/setup/djl_python" "$classes/"
rm -rf "$classes/djl_python/tests"
# Models name the handlers of the old container, whose code needs its toolkit.
for name in tensorrt_llm tensorrt_llm_python lmi_trtllm/trtllm_async_service; do
    cp "$here/old_handler.py" "$classes/djl_python/$name.py"
done
find "$classes/djl_python" -name __pycache__ -prune -exec rm -rf {} +
printf "\n__version__ = '%s'\n" "$version" >>"$classes/djl_python/__init__.py"
mkdir -p "$classes/native/lib"
{
    echo "version=$version"
    printf 'libraries=djl_python_engine.py'
    (cd "$classes" && find djl_python -type f | LC_ALL=C sort | while read -r file; do printf ',%s' "$file"; done)
    echo
} >"$classes/native/lib/python.properties"
jar --create --file "$out/lib/djl-serving-$version.jar" -C "$classes" .
