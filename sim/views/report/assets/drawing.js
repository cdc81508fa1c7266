// Draws a figure, given as JSON with names of the palette for colours, in a place.
"use strict";
const kvsimFigures = (() => {
  const root = document.documentElement;
  const LEGEND_PX = 70;
  const narrow = matchMedia("(max-width: 640px)");

  const palette = () => {
    const style = getComputedStyle(root);
    return (name) => style.getPropertyValue(`--${name}`).trim();
  };
  // "$run-1@0.3" is the palette's run-1, three tenths opaque.
  const colour = (text, of) => {
    const found = /^\$([a-z0-9-]+)(?:@([0-9.]+))?$/.exec(text);
    if (!found) return text;
    const hex = of(found[1]);
    if (!found[2]) return hex;
    const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
    return `rgba(${parts.join(",")},${found[2]})`;
  };
  const coloured = (value, of, key = "") => {
    if (typeof value === "string") return /color$/i.test(key) ? colour(value, of) : value;
    // Long lists are data, which no colour stands in.
    if (Array.isArray(value)) {
      const isData = value.length > 0 && (typeof value[0] !== "object" || value[0] === null);
      return isData ? value : value.map((each) => coloured(each, of));
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([name, each]) => [name, coloured(each, of, name)]),
    );
  };
  const looks = (layout, of, size) => {
    const axis = {
      gridcolor: of("rule"), zerolinecolor: of("rule"), linecolor: of("muted"),
      tickcolor: of("muted"), automargin: true, exponentformat: "SI", hoverformat: ",.6~g",
      tickfont: { size: 11, color: of("muted") },
    };
    const axes = Object.fromEntries(
      Object.entries(layout)
        .filter(([name]) => /^[xy]axis\d*$/.test(name))
        .map(([name, own]) => {
          const title = { font: { size: 12, color: of("muted") }, standoff: 6, ...own.title };
          return [name, { ...axis, ...own, title }];
        }),
    );
    return {
      ...layout, ...axes, ...size,
      uirevision: "kept", dragmode: "zoom", hovermode: "closest", hoverdistance: 24,
      barmode: "overlay", bargap: 0, separators: ".,",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: of("ink"), size: 12 },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", font: { size: 12 } },
      hoverlabel: {
        bgcolor: of("panel"), bordercolor: of("muted"), align: "left", namelength: -1,
        font: { color: of("ink"), size: 12 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: of("muted"), activecolor: of("ink") },
    };
  };
  // Panels side by side stand below each other where there is no room.
  const stacked = (layout) => {
    const names = Object.keys(layout).filter((name) => name.startsWith("yaxis"));
    const part = 1 / names.length, gap = 0.3 * part;
    const moved = names.flatMap((name, place) => {
      const x = name.replace("y", "x"), top = 1 - place * part;
      return [
        [name, { ...layout[name], domain: [top - part + gap, top] }],
        [x, { ...layout[x], domain: [0, 1] }],
      ];
    });
    return { ...layout, ...Object.fromEntries(moved) };
  };
  const draw = (place, spec, size = { autosize: true }) => {
    const of = palette();
    const { data, layout: given } = coloured(spec, of);
    const { isRow, heightPx } = given.meta;
    const isStacked = isRow && narrow.matches && size.autosize;
    const layout = isStacked ? stacked(given) : given;
    const times = isStacked ? Object.keys(given).filter((n) => n.startsWith("yaxis")).length : 1;
    place.style.height = `${size.height ?? heightPx * times + (narrow.matches ? LEGEND_PX : 0)}px`;
    const config = {
      responsive: true, displayModeBar: narrow.matches ? false : "hover", displaylogo: false, plotlyServerURL: "",
      // Named one by one: releases add buttons, some of which send the figure away.
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
      toImageButtonOptions: { format: "svg", filename: place.id },
    };
    Plotly.react(place, data, looks(layout, of, size), config);
  };
  return { draw, narrow, palette };
})();
