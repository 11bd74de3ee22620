// SPDX-License-Identifier: Apache-2.0
// Numbers and names as text, the same in charts, tooltips and tables; and small DOM helpers.
'use strict';

const Report = {};

(() => {
  // Four significant digits, as in the tables of the command line; zeros at the end stay, so that
  // the numbers of a column have one width. Integers are counts and shown whole.
  Report.number = (value, digits = 4) => {
    if (value === undefined || value === null) return '';
    if (Number.isInteger(value)) return String(value);
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(digits > 2 ? 2 : 1);
    return size >= 10 ** (digits - 1) ? String(Math.round(value)) : value.toPrecision(digits);
  };

  // Ratios: a fixed number of decimals, so that they stand under each other.
  Report.ratio = (value) => value.toFixed(3);

  // A value on an axis: as short as it can be.
  Report.tick = (value) => {
    const size = Math.abs(value);
    return size >= 1e6 || (size && size < 1e-4) ? value.toExponential() : String(Number(value.toPrecision(3)));
  };

  Report.count = (value) => (value >= 1024 && value % 1024 === 0 ? `${value / 1024}k` : String(value));

  Report.milliseconds = (value) => `${Report.number(value)} ms`;

  // Colour follows the implementation, never its place in a chart. The shape tells it apart
  // without colour: circles are ours, other shapes are peers.
  const LOOKS = {
    default: [1, 'circle'],
    splitkv: [1, 'circle'],
    flex_native: [2, 'circle'],
    nosplit: [2, 'circle'],
    flex_repeat: [3, 'circle'],
    mha: [3, 'circle'],
    jax_xla: [4, 'square'],
    jax_cudnn: [5, 'triangle'],
    torch_sdpa: [6, 'diamond'],
    flax: [7, 'square'],
  };
  const ORDER = Object.keys(LOOKS);

  Report.look = (name) => {
    const [slot, shape] = LOOKS[name] || [7, 'circle'];
    return {color: `var(--series-${slot})`, shape};
  };

  Report.bySeries = (a, b) => {
    const rank = (name) => (ORDER.indexOf(name) < 0 ? ORDER.length : ORDER.indexOf(name));
    return rank(a) - rank(b) || (a < b ? -1 : a > b ? 1 : 0);
  };

  // Numbers by size, 'auto' before numbers, other texts by alphabet.
  Report.byValue = (a, b) => {
    if (typeof a === 'number' && typeof b === 'number') return a - b;
    if (typeof a === 'number') return 1;
    if (typeof b === 'number') return -1;
    return a < b ? -1 : a > b ? 1 : 0;
  };

  Report.unique = (values) => [...new Set(values)];

  Report.element = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === 'text') node.textContent = value;
      else if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  };

  Report.describe = (row) => {
    const length = row.lq === row.lkv ? `L ${Report.count(row.lq)}`
        : `Lq ${row.lq}, Lkv ${Report.count(row.lkv)}`;
    const heads = row.hq === row.hkv ? `${row.hq} heads` : `${row.hq}/${row.hkv} heads`;
    const parts = [`${row.dtype} ${row.mode}`, `B ${row.batch}`, length, heads, `D ${row.head_dim}`];
    if (row.causal) parts.push('causal');
    if (row.num_splits !== undefined) parts.push(`splits ${row.num_splits}`);
    if (row.block_k !== undefined) parts.push(`block_k ${row.block_k}`);
    return parts.join(', ');
  };

  const tooltip = () => document.getElementById('tooltip');

  Report.showTooltip = (lines, x, y) => {
    const box = tooltip();
    box.replaceChildren();
    lines.forEach((line, index) => {
      const node = Report.element(index === 0 ? 'b' : 'div', {text: line});
      box.append(node);
    });
    box.hidden = false;
    const rect = box.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), window.innerWidth - rect.width - 8);
    const above = y - rect.height - 12;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${above > 8 ? above : y + 16}px`;
  };

  Report.hideTooltip = () => {
    tooltip().hidden = true;
  };
})();
