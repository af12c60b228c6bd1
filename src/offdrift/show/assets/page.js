// The report of a run: draws its charts, hides arms, and reads a token's numbers.
(() => {
  const { root, data, dark, color, config } = page;
  const hidden = new Set();

  const colored = trace => {
    const arm = color(`--arm-${trace.meta.arm % 8}`);
    const marker = { ...trace.marker, color: arm };
    if (marker.line) marker.line = { ...marker.line, color: color("--card") };
    return { ...trace, line: { ...trace.line, color: arm }, marker, visible: !hidden.has(trace.meta.arm) };
  };

  const layout = chart => ({
    ...chart.layout,
    ...page.look(),
    xaxis: { ...page.axis(), ...chart.layout.xaxis, title: { text: "update", standoff: 4, font: { size: 11 } } },
    yaxis: { ...page.axis(), ...chart.layout.yaxis, exponentformat: "power" },
    shapes: (chart.layout.shapes || []).map(s => ({ ...s, line: { ...s.line, color: color("--soft") } })),
  });

  const draw = () => Promise.all(data.charts.map(
    chart => Plotly.react(`chart-${chart.id}`, chart.data.map(colored), layout(chart), config)));

  draw().then(() => { root.dataset.drawn = data.charts.length; });
  dark.addEventListener("change", draw);

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const arm = Number(button.dataset.arm);
      if (!hidden.delete(arm)) hidden.add(arm);
      button.setAttribute("aria-pressed", String(!hidden.has(arm)));
      draw();
    });
  }

  page.tokens((token, index) => {
    const [arm, sample] = token.parentElement.dataset.sample.split(",").map(Number);
    const [kl, tv, logp, weight] = data.samples[arm][sample][index];
    return `“${token.textContent}”  token ${index + 1}\nKL ${kl} nat\nTV ${tv}\nlog-prob (rollout) ${logp} nat\nweight ${weight}`;
  });
})();
